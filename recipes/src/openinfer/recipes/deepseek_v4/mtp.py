"""The MTP layer, which predicts one more token. It reads the buffers that a step of the main model has filled.

The engine does not draft with it yet: it validates the weights of this layer and does not load them.
"""

from __future__ import annotations

from dataclasses import dataclass

from openinfer.kernels import Pack, embed, norm_rows, project, select_rows
from openinfer.kernels.weights import Linear
from openinfer.recipes.deepseek_v4.model import Model, Step
from openinfer.recipes.deepseek_v4.ops.common import PAGE
from openinfer.recipes.deepseek_v4.ops.hyper_connections import spread
from openinfer.recipes.deepseek_v4.weights import Mtp
from openinfer.tensor import Arena, Tensor, int32


@dataclass(frozen=True, slots=True)
class Further:
    """The MTP layer of a model, with its buffers.

    next_ids int32 [T]: for each token of a step, the token after it.
    kv [window pages, 128, d]: this layer's raw vectors; its pages have the ids of the window group's pages.
    streams [T, n, D]: scratch.
    """

    model: Model
    mtp: Mtp
    next_ids: Tensor
    kv: Tensor
    streams: Tensor

    @classmethod
    def allocate(cls, model: Model, arena: Arena) -> Further:
        """Raises ValueError for a model without this layer's weights."""
        if model.weights.mtp is None:
            raise ValueError("the weights of the MTP layer are not loaded")
        b, pages = model.buffers, model.cache.window.shape[0]
        kv = arena.alloc((pages, PAGE, model.config.head_dim), b.streams.dtype, "MTP window")
        streams = arena.alloc(b.streams.shape, b.streams.dtype, "MTP streams")
        return cls(model, model.weights.mtp, arena.alloc(model.batch.token_ids.shape, int32), kv, streams)

    def forward(self, pack: Pack, step: Step) -> None:
        """Turn the streams of the main model's last layer into those of this layer, in place.

        Call it between forward and sample of a step. `head` turns the streams into logits for the token after
        `next_ids`. Calling forward again on its own output drafts one more token.
        """
        model, mtp, b, t = self.model, self.mtp, self.model.buffers, step.tokens
        streams, width = b.streams[:t], b.streams.shape[2]
        rows, work = streams.reshape(-1, width), self.streams[:t].reshape(-1, width)
        embed(pack, out=b.shared[:t], token_ids=self.next_ids[:t], table=model.weights.embed)
        self._normed(pack, b.normed[:t], b.shared[:t], mtp.e_norm)
        self._project(pack, b.y[:t], b.normed[:t], mtp.e_proj)
        self._normed(pack, work, rows, mtp.h_norm)
        self._project(pack, rows, work, mtp.h_proj)
        spread(pack, streams=streams, x=b.y[:t], add=True)
        model.layer(pack, mtp.layer, step, self.kv)

    def head(self, pack: Pack, ends: Tensor) -> None:
        """Logits after the tokens ends[1:] - 1 (int32 [R + 1], as q_starts), in the model's buffer of logits."""
        b, rows = self.model.buffers, ends.shape[0] - 1
        streams = b.streams.reshape(b.streams.shape[0], -1)
        select_rows(pack, out=self.model.batch.last[:rows], x=streams, q_starts=ends)
        self.model.logits_of(pack, self.mtp.head, self.mtp.norm, rows)

    def _normed(self, pack: Pack, out: Tensor, x: Tensor, weight: Tensor) -> None:
        eps, quantized = self.model.config.rms_norm_eps, self.model.quantized
        norm_rows(pack, out=out, x=x, norm_weight=weight, eps=eps, quantized=quantized)

    def _project(self, pack: Pack, out: Tensor, x: Tensor, linear: Linear) -> None:
        """Packed weights are for inputs that are rounded where the model rounds."""
        rounded = self.model.quantized and linear.scales is not None
        weight, scales = linear.weight, linear.scales
        project(
            pack, out=out, x=x, weight=weight, scales=scales, groups=1, rounded_x=rounded, quantized=False
        )
