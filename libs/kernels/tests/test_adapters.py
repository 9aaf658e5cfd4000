"""Adapters: PEFT folders that are read or refused, and their places on a device."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.kernels import CpuPack, InvalidAdapter, add_lora
from openinfer.kernels.lora.adapters import Adapters, AdapterSizes, Projection
from openinfer.tensor import Arena, Checkpoint, Device, Stream, Tensor, bfloat16, dtypes, float16, float32

CPU = Device("cpu")
HIDDEN, Q, KV, INTER = 32, 48, 16, 64
AT = "model.layers.0."
SHAPES = {
    "self_attn.q_proj": (Q, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTER),
}
RNG = np.random.default_rng(0)


def make(places: int = 2, max_rank: int = 16, dtype: Any = float32) -> tuple[Adapters, Tensor, Tensor]:
    """Places for the adapters of a layer, its qkv weight and its down projection."""
    arena = Arena(CPU, 1 << 20)
    qkv = arena.alloc((Q + 2 * KV, HIDDEN), dtype)
    down, norm = arena.alloc((HIDDEN, INTER), dtype), arena.alloc((HIDDEN,), dtype)
    projections = [
        Projection(AT + "self_attn.v_proj", qkv[Q + KV :]),
        Projection(AT + "norm", norm),
        Projection(AT + "self_attn.q_proj", qkv[:Q]),
        Projection(AT + "self_attn.k_proj", qkv[Q : Q + KV]),
        Projection(AT + "mlp.down_proj", down),
    ]
    sizes = AdapterSizes(places, max_rank)
    made = Adapters.allocate(arena, sizes, [qkv, down], projections, dtype=dtype, unused=("mtp.",))
    return made, qkv, down


def matrices(rank: int, names: Any = SHAPES, dtype: Any = float32) -> dict[str, Any]:
    """A and B of modules, by their names in a PEFT file."""
    found = {}
    for name in names:
        rows, columns = SHAPES[name]
        found[f"base_model.model.{AT}{name}.lora_A.weight"] = RNG.standard_normal((rank, columns))
        found[f"base_model.model.{AT}{name}.lora_B.weight"] = RNG.standard_normal((rows, rank))
    return {name: array.astype(dtype) for name, array in found.items()}


def write(folder: Path, arrays: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    header, end = {}, 0
    for name, array in arrays.items():
        span = [end, end := end + array.nbytes]
        header[name] = {"dtype": dtypes.tag(array.dtype), "shape": array.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    names = sorted({name.split(".")[-3] for name in arrays})
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**usual, **config}))
    return folder


def added(adapters: Adapters, weight: Tensor, x: Any, ids: list[int]) -> Any:
    slots, places = (Tensor.from_numpy(np.array(n, np.int32)) for n in (range(len(ids)), ids))
    lora = adapters.of(weight, places, slots)
    out = np.full((len(ids), sum(lora.parts)), np.nan, x.dtype)
    add_lora(CpuPack(), out=Tensor.from_numpy(out), x=Tensor.from_numpy(x), add=False, lora=lora)
    return out


@pytest.mark.parametrize("stored", [float32, float16, bfloat16])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_adds_what_its_matrices_say(tmp_path: Path, stored: Any, rslora: bool) -> None:
    adapters, qkv, down = make()
    first, second = matrices(4, dtype=stored), matrices(4, ["self_attn.v_proj"], stored)
    one = adapters.read("one", write(tmp_path / "one", first, use_rslora=rslora))
    two = adapters.read("two", write(tmp_path / "two", second, lora_alpha=2))
    with Stream(CPU) as stream:
        adapters.put(2, one.values, stream)
        adapters.put(1, two.values, stream)
    x = RNG.standard_normal((3, HIDDEN)).astype(float32)
    got, (scale, small) = added(adapters, qkv, x, [2, 0, 1]), (8 / (2 if rslora else 4), 0.5)

    def change(arrays: Any, module: str, value: Any, factor: float) -> Any:
        a, b = (arrays[f"base_model.model.{AT}{module}.lora_{n}.weight"].astype(np.float64) for n in "AB")
        return factor * b @ (a @ value)

    parts = [change(first, f"self_attn.{n}_proj", x[0], scale) for n in "qkv"]
    np.testing.assert_allclose(got[0], np.concatenate(parts), rtol=1e-4, atol=1e-4)
    assert not got[1].any()
    assert not got[2, : Q + KV].any()
    np.testing.assert_allclose(
        got[2, Q + KV :], change(second, "self_attn.v_proj", x[2], small), rtol=1e-4, atol=1e-4
    )
    wide = RNG.standard_normal((1, INTER)).astype(float32)
    want = change(first, "mlp.down_proj", wide[0], scale)
    np.testing.assert_allclose(added(adapters, down, wide, [2])[0], want, rtol=1e-4, atol=1e-4)
    assert one.values.size == adapters.num_values


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_alphas_by_module(tmp_path: Path, rslora: bool) -> None:
    """As PEFT takes patterns: the first that fits the end of a module's name."""
    adapters, qkv, down = make()
    arrays = {**matrices(4, ["self_attn.q_proj", "mlp.down_proj"]), **matrices(8, ["self_attn.v_proj"])}
    patterns = {
        "rank_pattern": {r"^model.layers.0.self_attn.v_proj": 8, "proj": 2},
        "alpha_pattern": {r"layers\.0\.mlp\.down_proj": 3, "down_proj": 99, "v_proj": 5},
    }
    one = adapters.read("one", write(tmp_path / "one", arrays, use_rslora=rslora, **patterns))
    with Stream(CPU) as stream:
        adapters.put(1, one.values, stream)
    x, wide = (RNG.standard_normal((1, size)).astype(float32) for size in (HIDDEN, INTER))
    got, low = added(adapters, qkv, x, [1])[0], added(adapters, down, wide, [1])[0]
    roots = {4: 2.0, 8: 8**0.5} if rslora else {4: 4.0, 8: 8.0}
    for module, values, value, scale in (
        ("self_attn.q_proj", got[:Q], x[0], 8 / roots[4]),
        ("self_attn.v_proj", got[Q + KV :], x[0], 5 / roots[8]),
        ("mlp.down_proj", low, wide[0], 3 / roots[4]),
    ):
        a, b = (arrays[f"base_model.model.{AT}{module}.lora_{n}.weight"].astype(np.float64) for n in "AB")
        np.testing.assert_allclose(values, scale * b @ (a @ value), rtol=1e-4, atol=1e-4)


def test_the_same_values_have_the_same_digest(tmp_path: Path) -> None:
    adapters, _, _ = make()
    folder = write(tmp_path / "one", matrices(4))
    assert adapters.read("a", folder).digest == adapters.read("b", folder).digest
    write(folder, matrices(4))
    assert adapters.read("a", folder).digest != adapters.read("b", write(tmp_path / "x", matrices(4))).digest


def test_a_weight_without_places_has_nothing_added(tmp_path: Path) -> None:
    adapters, _, _ = make()
    other = Tensor.from_numpy(np.zeros((4, HIDDEN), float32))
    ids = Tensor.from_numpy(np.zeros(1, np.int32))
    assert adapters.of(other, ids, ids) is None


def test_other_ways_to_spell_modules(tmp_path: Path) -> None:
    """Names of a model with a vision tower, parts that are not run, and "all-linear"."""
    adapters, _, _ = make()
    arrays = {n.replace("model.layers", "model.language_model.layers"): a for n, a in matrices(4).items()}
    want = adapters.read("a", write(tmp_path / "nested", arrays)).digest
    more = arrays | {f"base_model.model.mtp.fc.lora_{n}.weight": np.ones((4, 4), float32) for n in "AB"}
    assert adapters.read("a", write(tmp_path / "more", more)).digest == want
    assert adapters.read("a", write(tmp_path / "all", arrays, target_modules="all-linear")).digest == want
    bare = {name.removeprefix("base_model.model."): array for name, array in arrays.items()}
    assert adapters.read("a", write(tmp_path / "bare", bare)).digest == want


NAME = f"base_model.model.{AT}mlp.down_proj.lora_%s.weight"
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a rank that is too high": ({}, {"r": 32}, "r is 32; --max-lora-rank is 16"),
    "another rank": ({}, {"r": 8}, r"has shape \[4, .*, and the model takes \[8, "),
    "another base": (
        {NAME % "A": np.ones((4, 80), float32)},
        {},
        r"\[4, 80\], and the model takes \[4, 64\]",
    ),
    "a missing matrix": ({NAME % "B": None}, {}, "down_proj has no lora_B"),
    "a missing module": (
        {NAME % "A": None, NAME % "B": None},
        {"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]},
        "down_proj has no lora_A",
    ),
    "a surplus module": ({}, {"target_modules": ["q_proj"]}, "is not among its target_modules"),
    "an unknown module": (
        {NAME.replace("down", "up") % "A": np.ones((4, 8), float32)},
        {},
        "is no projection",
    ),
    "an unknown target": ({}, {"target_modules": ["q_proj", "c_attn"]}, "'c_attn', which no projection"),
    "an embedding": (
        {"base_model.model.model.embed_tokens.weight": np.ones((4, 8), float32)},
        {},
        "is not one that can be run",
    ),
    "a NaN": ({NAME % "A": np.full((4, INTER), np.nan, float32)}, {}, "not finite"),
    "an infinite value": ({NAME % "B": np.full((HIDDEN, 4), np.inf, float16)}, {}, "not finite"),
    "integers": ({NAME % "A": np.ones((4, INTER), np.int32)}, {}, "is int32; bfloat16, float16, float32"),
    "no LoRA": ({}, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "a bias": ({}, {"bias": "all"}, "bias is 'all'; this is not supported"),
    "DoRA": ({}, {"use_dora": True}, "use_dora is True"),
    "saved modules": ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "another rank by module": (
        {},
        {"rank_pattern": {"q_proj": 2}},
        r"q_proj.* has shape \[4, 32\], and the model takes \[2, 32\]",
    ),
    "a rank by module that is too high": (
        {},
        {"rank_pattern": {"q_proj": 64}},
        "--max-lora-rank is 16; raise it",
    ),
    "no rank by module": (
        {},
        {"rank_pattern": {"q_proj": "4"}},
        "rank_pattern is {'q_proj': '4'}; a rank must",
    ),
    "no alpha by module": ({}, {"alpha_pattern": {"q_proj": None}}, "alpha must be a number"),
    "a slow pattern": ({}, {"alpha_pattern": {"(a+)+": 4}}, "it must be an object of names of modules"),
    "too many patterns": ({}, {"rank_pattern": {f"layers.{n}": 4 for n in range(4097)}}, "at most 4096"),
    "no patterns": ({}, {"rank_pattern": [4]}, "it must be an object of names of modules"),
    "a module twice": (
        {(NAME % "A").replace("model.layers", "model.language_model.layers"): np.ones((4, INTER), float32)},
        {},
        "are of the same module",
    ),
    "a base that was changed": ({}, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "a rank of zero": ({}, {"r": 0}, "r is 0"),
    "no number": ({}, {"lora_alpha": None}, "lora_alpha is None"),
    "no finite number": ({}, {"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "a number that no float holds": ({}, {"lora_alpha": 10**400}, "alpha must be a number"),
    "a product that overflows": (
        {NAME % "B": np.full((HIDDEN, 4), 3e38, float32)},
        {"lora_alpha": 1e6},
        "B times the scale is too large for",
    ),
    "no targets": ({}, {"target_modules": None}, "target_modules is None"),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_is_refused(tmp_path: Path, fault: str) -> None:
    arrays, config, why = BAD[fault]
    changed = {**matrices(4), **arrays}
    targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
    folder = write(
        tmp_path / "bad", {n: a for n, a in changed.items() if a is not None},
        **{"target_modules": targets, **config},
    )  # fmt: skip
    adapters, _, _ = make()
    with pytest.raises(InvalidAdapter, match=why) as caught:
        adapters.read("bad", folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert caught.value.user_can_mend


def test_folders_that_hold_no_adapter(tmp_path: Path) -> None:
    adapters, _, _ = make()
    with pytest.raises(InvalidAdapter, match=r"none: there is no adapter_config\.json; give the folder"):
        adapters.read("a", tmp_path / "none")
    folder = write(tmp_path / "a", matrices(4))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidAdapter, match=r"has no adapter_model\.safetensors"):
        adapters.read("a", folder)
    (folder / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.bin is a pickle, .* with safe_serialization"):
        adapters.read("a", folder)
    for text, why in (
        (" " * (1 << 21), "json: is larger than 1048576 bytes"),
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ("[" * 100000, "not valid JSON"),
    ):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(InvalidAdapter, match=why):
            adapters.read("a", folder)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """A training run may write its next adapter to the same folder. A mapped file would end the process by a signal."""
    adapters, _, _ = make()
    folder, info = write(tmp_path / "a", matrices(4)), Checkpoint.info

    def cut(checkpoint: Checkpoint, name: str) -> Any:
        os.truncate(folder / "adapter_model.safetensors", 1000)
        return info(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "info", cut)
    with pytest.raises(InvalidAdapter, match="the file ended early; it was cut while open"):
        adapters.read("a", folder)


def test_the_matrices_of_a_place_lie_together() -> None:
    """So one copy fills it. Kernels take the addresses for aligned."""
    adapters, qkv, _ = make(places=3, dtype=bfloat16)
    product = adapters._products[qkv.ptr]
    assert product.a.strides[0] == product.b.strides[0] == adapters.num_values
    assert all(t.ptr % 256 == 0 and t[1].ptr % 256 == 0 for t in (product.a, product.b))
