"""EAGLE-3 heads of Qwen3, in their published form: against a forward pass by hand, and in whole engines."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer.cli.explain.segments import Outline
from openinfer.graph import Buckets, Shape
from openinfer.graph.runner import segments
from openinfer.kernels import H200, CpuPack, InterpDriver, LaunchPack, Pack, Target
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.errors import SetupError
from openinfer.recipes.engine.testing.restless import fcfs
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.model import DraftingModel
from openinfer.tensor import CheckpointError, Device, Stream, Tensor, bfloat16, uint8

PATH = Path(__file__).parent / "goldens" / "qwen3-tiny"
H, D, HEADS, KEYS, INTER, VOCAB, DRAFTED, EPS = 64, 128, 4, 2, 320, 512, 400, 1e-5
LAYERS, THETA = [0, 1, 2], 10000.0
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS, "head_dim": D, "intermediate_size": INTER, "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED, "num_hidden_layers": 1, "rms_norm_eps": EPS, "rope_theta": THETA,
    "max_position_embeddings": 4096, "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS},
}  # fmt: skip
Arrays = dict[str, np.ndarray[Any, Any]]


def write_head(folder: Path, **changed: Any) -> Arrays:
    """A head with random weights, as published ones are stored."""
    rng, names = np.random.default_rng(4), {}

    def weight(name: str, *shape: int) -> None:
        scale = 1 / shape[-1] ** 0.5 if len(shape) > 1 else 0.2
        names[name] = (rng.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)

    weight("fc.weight", H, 3 * H)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weight(f"midlayer.{name}.weight", H)
    for name, rows in (("q_proj", HEADS * D), ("k_proj", KEYS * D), ("v_proj", KEYS * D)):
        weight(f"midlayer.self_attn.{name}.weight", rows, 2 * H)
    weight("midlayer.self_attn.o_proj.weight", H, HEADS * D)
    weight("midlayer.mlp.gate_proj.weight", INTER, H)
    weight("midlayer.mlp.up_proj.weight", INTER, H)
    weight("midlayer.mlp.down_proj.weight", H, INTER)
    weight("norm.weight", H)
    weight("lm_head.weight", DRAFTED, H)
    ids = np.sort(rng.permutation(VOCAB)[:DRAFTED])
    names["d2t"] = ids - np.arange(DRAFTED)
    names["t2d"] = np.isin(np.arange(VOCAB), ids)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    save_file(names, folder / "model.safetensors")
    return names


def speculation(folder: Path, drafts: int = 2) -> str:
    return json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": drafts})


# -- by hand --


def normed(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotated(x: Any, positions: Any) -> Any:
    """x [T, heads, D], halves rotated."""
    angles = positions[:, None] * THETA ** -(np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class ByHand:
    """The layer over a growing sequence, token after token."""

    def __init__(self, weights: Arrays) -> None:
        self.w = {name: array.astype(np.float64) for name, array in weights.items() if name != "t2d"}
        self.keys, self.values = np.zeros((0, KEYS, D)), np.zeros((0, KEYS, D))

    def layer(self, hidden: Any, embeds: Any, keep: int) -> Any:
        """hidden, embeds [T, H] of the tokens after the `keep` first."""
        w, at = self.w, "midlayer."
        x = np.concatenate(
            [normed(embeds, w[at + "input_layernorm.weight"]), normed(hidden, w[at + "hidden_norm.weight"])],
            1,
        )
        positions = keep + np.arange(len(x))
        q, k, v = (x @ w[f"{at}self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k = rotated(q.reshape(-1, HEADS, D), positions), rotated(k.reshape(-1, KEYS, D), positions)
        self.keys = np.concatenate([self.keys[:keep], k])
        self.values = np.concatenate([self.values[:keep], v.reshape(-1, KEYS, D)])
        heads = np.zeros_like(q)
        for row, head in np.ndindex(len(x), HEADS):
            seen, group = keep + row + 1, head // (HEADS // KEYS)
            scores = self.keys[:seen, group] @ q[row, head] / D**0.5
            chances = np.exp(scores - scores.max())
            heads[row, head] = chances @ self.values[:seen, group] / chances.sum()
        hidden = hidden + heads.reshape(len(x), -1) @ w[at + "self_attn.o_proj.weight"].T
        x = normed(hidden, w[at + "post_attention_layernorm.weight"])
        gate, up = x @ w[at + "mlp.gate_proj.weight"].T, x @ w[at + "mlp.up_proj.weight"].T
        return hidden + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T

    def logits(self, hidden: Any) -> Any:
        drafted = normed(hidden, self.w["norm.weight"]) @ self.w["lm_head.weight"].T
        found = np.full(VOCAB, -np.inf)
        found[np.arange(DRAFTED) + self.w["d2t"].astype(int)] = drafted
        return found


class Spying(DraftingModel):
    """Keeps what the head reads."""

    seen: ClassVar[list[np.ndarray[Any, Any]]] = []

    def before_layer(self, pack: Pack, number: int, x: Tensor) -> None:
        super().before_layer(pack, number, x)
        if number in LAYERS:
            self.seen.append(x.numpy().astype(np.float64))


def spied(model: DraftingModel) -> Spying:
    return Spying(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})


def run_prompt(model: DraftingModel, pack: Pack, drafts: int) -> tuple[list[int], Any]:
    """A prompt of 13 tokens and its drafts: prompt and the token sampled, and the drafts of positions 14 and 15."""
    shape = Shape(16, 1, 16)
    work = segments(model, pack, Buckets((1,), (16,), (1,), drafts))
    rows = model.batch.rows
    for name, value in {"alive": 1, "limits": 60, "reserved": 32}.items():
        rows.set(name, 1, value)
    rows.write("stop_ids", 1, [-1] * 20)
    rows.write("block_tables", 1, [3, 5])
    prompt = np.random.default_rng(10).integers(3, 500, 13).tolist()
    rows.write("prompt", 0, [*prompt, -1, -1, -1])
    for name, values in {"slots": [1], "emits": [1], "q_starts": [0, 13], "sure_starts": [0, 13]}.items():
        rows.write(name, 0, values)
    for _ in rows.uploads(Stream(Device("cpu"))):
        work["upload",]()
    for key in (("forward", shape), ("sample", 1, 0), ("draft", shape, drafts)):
        work[key]()
    tokens = [*prompt, int(rows["last_tokens"].numpy()[1])]
    proposed = rows["drafts"].numpy()[1]
    return tokens, [int(proposed[place % len(proposed)]) for place in range(14, 14 + drafts)]


def test_drafts_are_those_of_a_forward_pass_by_hand(place: Callable[..., Any], tmp_path: Path) -> None:
    weights = write_head(tmp_path)
    model = spied(
        place(
            RECIPE,
            PATH,
            [6],
            max_rows=2,
            max_tokens=16,
            length=64,
            speculative_config=speculation(tmp_path, 3),
        )
    )
    model.seen.clear()
    tokens, drafts = run_prompt(model, CpuPack(), 3)
    table = model.weights.embed.numpy().astype(np.float64)
    hand = ByHand(weights)
    fused = np.concatenate([x[:13] for x in model.seen], 1) @ hand.w["fc.weight"].T
    hidden = hand.layer(fused, table[tokens[1:]], 0)[-1]
    wanted: list[int] = []
    for place_of_draft in range(3):
        wanted.append(int(hand.logits(hidden).argmax()))
        if place_of_draft < 2:
            (hidden,) = hand.layer(hidden[None], table[wanted[-1:]], 13 + place_of_draft)
    assert drafts == wanted
    last = model.batch.logits[:1].numpy()[0]
    np.testing.assert_allclose(last, hand.logits(hidden), rtol=1e-3, atol=1e-3)


def test_a_gpus_launches_in_the_interpreter(place: Callable[..., Any], tmp_path: Path) -> None:
    write_head(tmp_path)
    regions = (Tensor.from_numpy(np.zeros(64 << 20, uint8)) for _ in range(2))
    packs = LaunchPack(Target(arch=90, num_sms=4, interpreted=True), InterpDriver(), *regions), CpuPack()
    found = []
    for pack in packs:
        model = place(
            RECIPE, PATH, [6], max_rows=2, max_tokens=16, length=64, dtype=bfloat16,
            speculative_config=speculation(tmp_path, 1),
        )  # fmt: skip
        run_prompt(model, pack, 1)
        found.append(model.batch.logits[:1].numpy()[0])
    ours, expected = found
    assert (np.isneginf(ours) == np.isneginf(expected)).all()
    known = np.isfinite(expected)
    assert known.sum() == DRAFTED
    assert np.linalg.norm(ours[known] - expected[known]) / np.linalg.norm(expected[known]) < 0.04


# -- whole engines --


@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_random_head_changes_no_token(session: Callable[..., Any], tmp_path: Path, cache: str) -> None:
    """In chunks, with preemption, cached prefixes and samples; a random head is seldom right."""
    write_head(tmp_path)
    rng = random.Random(2)
    asked = []
    for n in range(6):
        prompt = [rng.randrange(3, 500) for _ in range(20 + 3 * n)]
        asked.append(
            (prompt, 24, {"ignore_eos": True, "temperature": 0.4 * (n % 3), "seed": n, "logprobs": 1})
        )
    plain = session(PATH, max_num_seqs=1, enable_prefix_caching=False, kv_cache_dtype=cache)
    small = {"max_num_batched_tokens": 32, "scheduling_policy": fcfs(32)}
    drafted = session(PATH, speculative_config=speculation(tmp_path), kv_cache_dtype=cache, **small)
    # Such a head is not worth its time: without this it would hardly draft.
    drafted.engine.runner.drafting.worth.choose = lambda available, rows, cost: 2
    for want, got in zip(plain.outcomes_of(asked), drafted.outcomes_of(asked), strict=True):
        assert got.tokens == want.tokens
        for mine, theirs in zip(want.logprobs, got.logprobs, strict=True):
            assert abs(mine.logprob - theirs.logprob) < 1e-4
    stats = drafted.engine.stats()
    assert stats.preemptions > 0
    assert stats.draft_tokens > 50


def test_ranks_have_their_parts_of_a_head(session: Callable[..., Any], tmp_path: Path) -> None:
    """Two ranks make the drafts of one."""
    write_head(tmp_path)
    asked = [(list(range(20, 50 + n)), 16, {"temperature": 0.5, "seed": n}) for n in range(3)]
    found = []
    for ranks in (1, 2):
        drafted = session(PATH, speculative_config=speculation(tmp_path), tensor_parallel_size=ranks)
        drafted.engine.runner.drafting.worth.choose = lambda available, rows, cost: 2 if available else 0
        tokens = [one.tokens for one in drafted.outcomes_of(asked)]
        found.append((tokens, drafted.engine.runner.model.batch.rows["drafts"].numpy().copy()))
    assert found[0][0] == found[1][0]
    assert found[0][1].any()
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("changed", "flags", "complaint"),
    [
        ({"hidden_size": 128}, {}, "hidden_size"),
        ({"num_key_value_heads": 4}, {}, "num_key_value_heads"),
        ({"head_dim": 64}, {}, "shares the pages"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 0, 1]}}, {}, "ascending"),
        ({"eagle_config": 5}, {}, "eagle_config is 5; it must be an object"),
        ({"draft_vocab_size": 300}, {}, r"lm_head.weight .* is \[400, 64\], must be \[300, 64\]"),
        ({"intermediate_size": 352}, {}, r"mlp.gate_proj.weight .* is \[320, 64\], must be \[352, 64\]"),
        ({"intermediate_size": 328}, {"tensor_parallel_size": 2}, "intermediate_size"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    session: Callable[..., Any], tmp_path: Path, changed: Any, flags: Any, complaint: str
) -> None:
    write_head(tmp_path, **changed)
    with pytest.raises((SetupError, CheckpointError, ValueError), match=complaint):
        session(PATH, speculative_config=speculation(tmp_path), **flags)


def test_the_key_model_belongs_to_eagle3(session: Callable[..., Any], tmp_path: Path) -> None:
    for text in (
        '{"method": "eagle3", "num_speculative_tokens": 2}',
        speculation(tmp_path).replace("eagle3", "ngram"),
    ):
        with pytest.raises(SetupError, match="need the key model"):
            session(PATH, speculative_config=text)
    with pytest.raises(SetupError, match=r"key model: \S*nowhere/config.json does not exist"):
        session(PATH, speculative_config=speculation(tmp_path / "nowhere"))


def test_a_plan_counts_the_memory_of_the_head(tmp_path: Path) -> None:
    write_head(tmp_path)
    options = RECIPE.options(max_num_seqs=8, speculative_config=speculation(tmp_path))
    outline = Outline(RECIPE, Source.read(PATH), options, H200)
    assert outline.memory["EAGLE-3 head"] > 2 * H * (3 * H + INTER * 3)
    assert 0 <= outline.fixed_bytes - sum(outline.memory.values()) < 1 << 14
