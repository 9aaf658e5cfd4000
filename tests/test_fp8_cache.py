"""--kv-cache-dtype fp8 on the CPU engines: half the bytes, the same bits however a cache was filled, and
log-probabilities near those of the engine without it."""

from __future__ import annotations

import datetime
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openinfer.cli import explain, recipes
from openinfer.kernels import Target
from openinfer.recipes.engine import Options, SetupError, Source
from openinfer.recipes.engine.blueprint import Blueprint
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.startup import build, kernel_specs
from openinfer.recipes.qwen3 import RECIPE
from openinfer.recipes.qwen3.blueprint import Qwen3
from openinfer.tensor import Checkpoint

GOLDENS = Path(__file__).parent / "goldens"
MODELS = ("qwen3-tiny", "qwen3_5-tiny")
FLAGS: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512,
    "kv_cache_memory_bytes": 16 << 20, "batch_invariant": True,
}  # fmt: skip
MEAN_NAT, P99_NAT = 0.35, 1.0
"""How far log-probabilities of likely tokens may be from those without the flag, in these random models."""
CHUNKS, TODAY = (1, 7, 64), datetime.date.today().toordinal()
Build = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[Build]:
    """engine(path, flags): closed at the end, with all blocks back."""
    made = []

    def make(path: Path, **flags: Any) -> Engine:
        made.append(build(recipes.find(path), path, **{**FLAGS, "kv_cache_dtype": "fp8", **flags}).engine)
        return made[-1]

    yield make
    for one in made:
        one.pool.check_integrity()
        assert one.pool.num_free == one.pool.num_total
        one.close()


def prompts(count: int, length: int = 150) -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(3, 480, length + n).tolist() for n in range(count)]


def spoiled(engine: Engine) -> None:
    """Each head of the cache gets the scales of another one."""
    cache = engine.runner.model.kv
    pages, scales = cache.pages.numpy(), cache.scales
    inside = np.frombuffer(pages, np.uint8, offset=scales.ptr - cache.pages.ptr)
    inside = np.lib.stride_tricks.as_strided(inside, scales.shape, scales.strides)
    inside[...] = np.roll(inside, 1, axis=3)
    cache.pages.copy_from(pages)


def logits(
    engine: Engine, tokens: Sequence[Sequence[int]], *, chunk: int = 256, last: int = 6, wrong: bool = False,
    salt: bytes | None = None,
) -> Any:  # fmt: skip
    """After each of the last tokens, fed one by one, of all sequences together. wrong: the negative control."""
    forced = Forced(engine)
    rows = [forced.join(n, one, salt) for n, one in enumerate(tokens, start=1)]
    for row, one in zip(rows, tokens, strict=True):
        forced.feed(row, len(one) - last, chunk)
    if wrong:
        spoiled(engine)
    found = [forced.step([(row, 1) for row in rows]).copy() for _ in range(last)]
    forced.leave()
    return np.stack(found, 1)


def logprobs(found: Any) -> Any:
    wide = found.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param(CHUNKS[TODAY % 3 :][:1], id="of the day"),
        pytest.param(CHUNKS, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_a_cache_has_the_same_bits_however_it_was_filled(
    engine: Build, model: str, chunks: tuple[int, ...]
) -> None:
    made = engine(GOLDENS / model)
    asked = prompts(3)
    right = logits(made, asked)
    for n, one in enumerate(asked):
        alone = logits(made, [one], salt=b"once")
        np.testing.assert_array_equal(alone[0], right[n], "beside other rows")
        hits = made.pool.stats.hit_tokens
        np.testing.assert_array_equal(logits(made, [one], salt=b"once")[0], right[n], "a cached prefix")
        assert made.pool.stats.hit_tokens > hits
    for chunk in chunks:
        np.testing.assert_array_equal(logits(made, asked, chunk=chunk), right, f"chunks of {chunk}")


@pytest.fixture(scope="module", params=MODELS)
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden checkpoint whose values of one key head are large and of another one small. Columns of the next
    projection make up for it, by powers of two; so the model is the same, and its cache is not."""
    source, folder = GOLDENS / request.param, tmp_path_factory.mktemp("uneven") / request.param
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    config = config.get("text_config", config)
    heads, groups, dim = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    factors = np.float32(2.0) ** np.linspace(-4, 4, groups).round()
    with Checkpoint(source) as checkpoint:
        weights = {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
    for name, weight in weights.items():
        if name.endswith("self_attn.v_proj.weight"):
            weight *= np.repeat(factors, dim)[:, None].astype(weight.dtype)
        elif name.endswith("self_attn.o_proj.weight"):
            weight *= np.repeat(1 / factors, dim * heads // groups).astype(weight.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_logprobs_are_near_those_of_the_whole_numbers(engine: Build, uneven: Path) -> None:
    """And scales that are exchanged between heads are noticed."""
    asked = prompts(4)
    wanted = logprobs(logits(engine(uneven, kv_cache_dtype="auto"), asked))
    made = engine(uneven)
    likely = np.argsort(-wanted, -1)[..., :32]

    def distance(found: Any) -> Any:
        return np.abs(np.take_along_axis(logprobs(found) - wanted, likely, -1))

    near, far = distance(logits(made, asked)), distance(logits(made, asked, wrong=True))
    assert 0 < near.mean() < MEAN_NAT
    assert np.quantile(near, 0.99) < P99_NAT
    assert far.mean() > 2 * MEAN_NAT
    assert np.quantile(far, 0.99) > 2 * P99_NAT


@pytest.mark.parametrize("model", MODELS)
def test_the_pool_holds_more_tokens_and_says_so(
    engine: Build, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    room = {"kv_cache_memory_bytes": 4 << 20, "dtype": "bfloat16", "max_num_seqs": 16}
    made = [engine(GOLDENS / model, kv_cache_dtype=name, **room) for name in ("bfloat16", "fp8")]
    (plain, fp8), dim = [one.pool.groups[0] for one in made], made[0].runner.model.config.head_dim
    assert fp8.block_bytes / plain.block_bytes == (dim + 1) / (2 * dim)
    assert made[1].runner.model.kv.pages.nbytes == fp8.num_blocks * fp8.block_bytes
    assert fp8.num_blocks / plain.num_blocks == pytest.approx(2 * dim / (dim + 1), rel=0.03)
    for one, name in zip(made, ("bfloat16", "float8_e4m3fn"), strict=True):
        assert f"{one.info.kv_capacity_tokens} tokens of cache in {name} (" in caplog.text


def test_explain_says_what_the_cache_holds(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for name in ("auto", "fp8"):
        assert explain.main(["Qwen/Qwen3-4B", "--decode", "64,4096", "--kv-cache-dtype", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        (attention,) = (line.split() for line in lines if line.startswith("norm_rope_attend"))
        (tokens,) = (int(line.split()[-2]) for line in lines if "fits alone" in line)
        (dtype,) = (line.split()[-1] for line in lines if "the cache of keys and values" in line)
        found[name] = dtype, float(attention[3]), tokens
    assert [one[0] for one in found.values()] == ["bfloat16", "float8_e4m3fn"]
    assert found["fp8"][1] / found["auto"][1] == pytest.approx(129 / 256, abs=0.01)
    assert found["fp8"][2] / found["auto"][2] == pytest.approx(256 / 129, abs=0.01)


def test_a_folder_of_another_format_is_not_read(engine: Build, tmp_path: Path) -> None:
    flags = {"kv_offload_dir": str(tmp_path), "kv_offload_disk_gb": 0.05}
    for name, folders in (("fp8", 1), ("auto", 2), ("fp8_e4m3", 2)):
        build(RECIPE, GOLDENS / "qwen3-tiny", **FLAGS, kv_cache_dtype=name, **flags).engine.close()
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == folders


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("qwen3-tiny", {"kv_cache_dtype": "fp8_e5m2"}, "auto, bfloat16, fp8, fp8_e4m3 are possible"),
        ("qwen3-tiny", {"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16 needs --dtype bfloat16"),
        (
            "deepseek_v4-tiny",
            {},
            "--kv-cache-dtype is not possible with deepseek_v4: it caches latents",
        ),
    ],
)
def test_what_is_refused(engine: Build, model: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        engine(GOLDENS / model, **flags)


def test_a_recipe_without_such_a_cache_is_refused(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3, "cache_forms", Blueprint.cache_forms)
    with pytest.raises(SetupError, match="--kv-cache-dtype: this model's recipe has no FP8 cache"):
        engine(GOLDENS / "qwen3-tiny")


def test_a_gpu_without_float8_is_refused() -> None:
    source = Source(RECIPE.published()["0.6B"])
    with pytest.raises(
        SetupError, match="--kv-cache-dtype fp8 needs a GPU of sm_89 or newer, and this is sm_80"
    ):
        kernel_specs(RECIPE, source, Options(kv_cache_dtype="fp8"), Target(80, 108))
