"""The MTP layer, which predicts one more token. It reads the buffers that a step of the main model has filled."""

from dataclasses import dataclass

from openinfer.graph.runner import StepRows
from openinfer.kernels import Pack, embed, norm_rows
from openinfer.recipes.deepseek_v4.buffers import Activations
from openinfer.recipes.deepseek_v4.model import Model, StepSize
from openinfer.recipes.deepseek_v4.ops.streams import spread
from openinfer.recipes.deepseek_v4.weights import Mtp
from openinfer.tensor import Tensor


@dataclass(frozen=True, slots=True)
class DraftingModel(Model):
    """graph.runner.Proposer: a Model whose MTP layer drafts. Its raw vectors have the last layer of the window's pages.

    work [T n, D]: scratch.
    """

    work: Activations | None = None

    @property
    def _layer(self) -> tuple[Mtp, Activations]:
        if self.weights.mtp is None or self.work is None:
            raise TypeError("the MTP layer is not loaded")
        return self.weights.mtp, self.work

    seen = Model.hidden

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """Turn the streams of the main model's last layer, or of this layer, into those of this layer, in place. It
        takes positions and slots of tokens from the batch, as every layer does."""
        (mtp, work), b, t, rows = self._layer, self.buffers, token_ids.shape[0], step["slots"].shape[0]
        streams, width = b.streams[:t], b.streams.shape[2]
        flat, scratch = streams.reshape(-1, width), work[: t * streams.shape[1]]
        embed(pack, out=b.shared[:t], token_ids=token_ids, table=self.weights.embed)
        eps = self.config.rms_norm_eps
        norm_rows(pack, out=b.rounded[:t], x=b.shared[:t], norm_weight=mtp.e_norm, eps=eps)
        self._project(pack, b.y[:t], b.rounded[:t], mtp.e_proj)
        norm_rows(pack, out=scratch, x=flat, norm_weight=mtp.h_norm, eps=eps)
        self._project(pack, flat, scratch, mtp.h_proj)
        spread(pack, streams=streams, x=b.y[:t], add=True)
        layer, size = mtp.layer, StepSize(t, rows, max_q_len)
        if only_keys:
            self.read_streams(pack, layer.attn_mixing, layer.attn_norm, size)
            self.write_keys(pack, layer, size)
        else:
            self.layer(pack, layer, size)

    def draft_head(self, pack: Pack, num_rows: int, place: int) -> None:
        """Logits of this layer's streams in `batch.last`."""
        mtp, _ = self._layer
        self.logits_of(pack, mtp.head, mtp.norm, self.batch.last[:num_rows])
