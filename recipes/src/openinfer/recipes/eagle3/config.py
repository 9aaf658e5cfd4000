"""The config of an EAGLE-3 head, held against the model that it drafts for."""

from dataclasses import dataclass
from pathlib import Path

from openinfer.recipes.engine.config_fields import Fields, ModelConfig, read_config, size
from openinfer.recipes.engine.errors import SetupError, UnsupportedModel
from openinfer.recipes.engine.rope import Rope, rope_of

READ = 3
"""Layers of the model that the head reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(ModelConfig):
    """The config of a model whose tokens a head may draft."""

    num_layers: int = size("num_hidden_layers")
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Head:
    """The config of a head, and its folder. layers: the head reads the residual stream before these layers."""

    path: Path
    num_heads: int
    intermediate_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope: Rope
    layers: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, target: TargetConfig) -> "Head":
        """The head of a folder for a model. Raises SetupError, or UnsupportedModel naming the key."""
        try:
            fields = Fields(read_config(path / "config.json"), f"{path}/config.json")
        except UnsupportedModel as error:
            raise SetupError(f"--speculative-config: the key model: {error}") from None
        known = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_key_value_heads": target.num_kv_heads,
        }
        fields.is_all(known, "a head of this model has")
        heads = fields.size("num_attention_heads")
        dim = fields.size("head_dim", default=target.hidden_size // heads)
        if dim != target.head_dim or heads % target.num_kv_heads:
            raise UnsupportedModel(
                f"{path}/config.json: {heads} heads of {dim}; the head shares the pages of the model, whose heads have "
                f"{target.head_dim} elements and {target.num_kv_heads} keys"
            )
        fields.is_all({"num_hidden_layers": 1}, "this recipe runs")
        inter = fields.size("intermediate_size")
        target.part.check({"num_attention_heads": (heads, 1), "intermediate_size": (inter, 16)})
        drafts = fields.size("draft_vocab_size", default=target.vocab_size)
        eps, rope = fields.number("rms_norm_eps", default=1e-6, most=1), rope_of(fields, dim, default=1e4)
        return cls(path, heads, inter, drafts, eps, rope, _layers(fields, target.num_layers))

    def sizes(self, target: TargetConfig) -> tuple[int, int, int]:
        """Columns of queries, of keys and of the MLP that a rank has."""
        dim, of = target.head_dim, target.part.of
        return of(self.num_heads) * dim, of(target.num_kv_heads) * dim, of(self.intermediate_size)


def _layers(fields: Fields, count: int) -> tuple[int, ...]:
    """eagle_aux_hidden_state_layer_ids, at the top or in eagle_config; else the second, the middle and the third from
    the end, as published heads are trained."""
    key = "eagle_aux_hidden_state_layer_ids"
    found = fields.get(key) or fields.fields("eagle_config").get(key) or (2, count // 2, count - 3)
    good = isinstance(found, list | tuple) and len(found) == READ and all(type(n) is int for n in found)
    if not good or not 0 <= found[0] <= found[1] <= found[2] <= count:
        raise UnsupportedModel(
            f"{fields.where}: {key} is {found!r:.80}; give {READ} layers in 0 to {count}, ascending"
        )
    return tuple(found)
