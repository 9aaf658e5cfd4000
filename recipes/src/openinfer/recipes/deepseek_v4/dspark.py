"""The DSpark drafter: layers that make all drafts of a row in one pass, and a head that draws them one by one."""

from dataclasses import dataclass, field

from openinfer.graph.runner import StepRows
from openinfer.kernels import Pack, code_rows, embed, norm_rows
from openinfer.kernels.authoring import Coded
from openinfer.recipes.deepseek_v4.config import Config, Dspark
from openinfer.recipes.deepseek_v4.model import Activations, Model, StepSize
from openinfer.recipes.deepseek_v4.ops.blocks import markov, start_block
from openinfer.recipes.deepseek_v4.ops.hyper_connections import mean_streams, spread
from openinfer.recipes.deepseek_v4.weights import Stages
from openinfer.recipes.engine.limits import Limits
from openinfer.tensor import Arena, Tensor, float32


@dataclass(frozen=True, slots=True)
class BlockBuffers:
    """What a drafter keeps between a step and its drafts, for T tokens and R rows. k: the model's layers that it
    reads, D: the hidden size, d: of a raw vector."""

    read: Tensor  # [T, k D]
    coded: Activations  # the same for the product that rounds its input, else `read` itself
    own: Tensor  # [T, d]
    survival: Tensor  # float32 [R]: the chance that a row's drafts so far are right, as the drafter sees it

    @classmethod
    def allocate(cls, c: Config, d: Dspark, arena: Arena, limits: Limits, quantized: bool) -> "BlockBuffers":
        """Uninitialised. quantized: products round their inputs."""
        shape = (limits.step_tokens, len(d.targets) * c.hidden_size)
        read = arena.alloc(shape, limits.dtype, "DSpark reads")
        return cls(
            read=read,
            coded=Coded.allocate(arena, shape, limits.dtype) if quantized else read,
            own=arena.alloc((limits.step_tokens, c.head_dim), limits.dtype, "vectors of drafts"),
            survival=arena.alloc((limits.max_rows,), float32),
        )


@dataclass(frozen=True, slots=True)
class BlockDraftingModel(Model):
    """graph.runner.BlockProposer: a Model with a DSpark drafter. The raw vectors of its layers have the last layers of
    the window's pages. reads: the numbers of the layers (before_layer) before which it reads the streams."""

    drafter: Dspark = field(kw_only=True)
    kept: BlockBuffers = field(kw_only=True)
    reads: tuple[int, ...] = field(kw_only=True)

    @property
    def _stages(self) -> Stages:
        assert self.weights.stages is not None
        return self.weights.stages

    @property
    def seen(self) -> Tensor:
        return self.kept.read

    @property
    def survival(self) -> Tensor:
        return self.kept.survival

    def before_layer(self, pack: Pack, number: int, step: StepSize) -> None:
        width, streams = self.config.hidden_size, self.buffers.streams[step.mine]
        for place, at in enumerate(self.reads):
            if at == number:
                out = self.seen[step.mine, place * width : (place + 1) * width]
                mean_streams(step.dealt(pack), out=out, streams=streams)
        if number == max(self.reads):
            self.share(pack, self.seen[: step.tokens], step)

    def further(
        self, pack: Pack, token_ids: Tensor, step: StepRows, max_q_len: int,
        *, first: bool, only_keys: bool = False,
    ) -> None:  # fmt: skip
        """Write the raw vectors of the step's tokens, which need no ids. rounded = what all layers make them of."""
        stages, kept, b, t = self._stages, self.kept, self.buffers, token_ids.shape[0]
        read, eps = kept.coded[:t], self.config.rms_norm_eps
        if isinstance(read, Coded):
            code_rows(pack, out=read, x=kept.read[:t])
        self._project(pack, b.y[:t], read, stages.main_proj)
        norm_rows(pack, out=b.rounded[:t], x=b.y[:t], norm_weight=stages.main_norm, eps=eps)
        for layer in stages.layers:
            self.write_keys(pack, layer, StepSize(t, step["slots"].shape[0], max_q_len))

    def block(self, pack: Pack, num_rows: int, places: int) -> None:
        """See BlockProposer. All of a block is computed, however few drafts a row gets, as the layers were trained."""
        stages, drafter, batch, b = self._stages, self.drafter, self.batch, self.buffers
        r, t, rows = num_rows, num_rows * drafter.block, batch.rows
        assert batch.proposals is not None
        ids = batch.proposals.next_ids[:t]
        by_slot = {name: rows[name] for name in ("alive", "last_tokens", "seq_lens")}
        start_block(
            pack, token_ids=ids, positions=batch.positions[:t], token_slots=batch.token_slots[:t],
            slots=rows["slots"][:r], emits=rows["emits"][:r], **by_slot, noise=drafter.noise,
        )  # fmt: skip
        embed(pack, out=b.y[:t], token_ids=ids, table=self.weights.embed)
        spread(pack, streams=b.streams[:t], x=b.y[:t], add=False)
        for layer in stages.layers:
            self.layer(pack, layer, StepSize(t, r, drafter.block), self.kept.own[:t])
        self.logits_of(pack, stages.head, stages.norm, b.streams[: places * r])

    def draft_head(self, pack: Pack, num_rows: int, place: int) -> None:
        """Add to a draft's logits what the token before it says, which is in `next_ids`."""
        stages, batch = self._stages, self.batch
        part = slice((place - 1) * num_rows, place * num_rows)
        assert batch.proposals is not None
        markov(
            pack, logits=batch.logits[part], hidden=self.buffers.collapsed[part],
            token_ids=batch.proposals.next_ids[:num_rows], before=stages.rows, after=stages.columns,
            confidence=stages.confidence, survival=self.survival[:num_rows], place=place,
        )  # fmt: skip
