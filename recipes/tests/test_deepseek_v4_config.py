"""config.json and checkpoints of DeepSeek-V4: the published inventories to the byte, and what is refused by name."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from openinfer.kernels import ContractError, Target
from openinfer.kernels.testing import of_the_day
from openinfer.kvpool import Pool
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.deepseek_v4.cache import V4Cache, eviction, groups
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.published import SIZES, config_json
from openinfer.recipes.deepseek_v4.weights import Format, Weights, check_scales, validate
from openinfer.recipes.engine import SetupError, Source, UnsupportedModel
from openinfer.recipes.engine.limits import Room, decide, fit
from openinfer.recipes.engine.startup import kernel_specs
from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.tensor import Arena, Checkpoint, CheckpointError, Device, bfloat16, float32, uint8

PUBLISHED = {  # tensors and bytes of the checkpoint, and bytes of entries a token
    "Flash": (69_187, 159_609_485_896, 6_880),
    "Pro": (145_116, 864_704_792_696, 9_848),
}
FLASH_DTYPES = {
    "bfloat16": 433,
    "float32": 417,
    "float8_e4m3fn": 375,
    "float8_e8m0fnu": 34_167,
    "int8": 33_792,
    "int64": 3,
}
SMALL = {
    **config_json("Flash", layers=4),
    "hidden_size": 128,
    "num_attention_heads": 4,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "index_n_heads": 16,
    "moe_intermediate_size": 128,
    "n_routed_experts": 7,
    "num_experts_per_tok": 2,
    "vocab_size": 32,
    "num_hash_layers": 1,
}


class Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def inventory(config: Config, *, fp4_experts: bool, mtp: bool) -> list[Entry]:
    """Every tensor of a published checkpoint."""
    form = Format(fp4_experts=fp4_experts, mtp=mtp)
    expected = Weights.allocate(config, Arena(Device("null"), None), bfloat16, form).places.expected()
    return [Entry(name, shape, kinds[0]) for name, (shape, kinds) in expected.items()]


def nbytes_of(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


@pytest.mark.parametrize("size", of_the_day([*SIZES]))
def test_published_sizes_have_their_inventory(size: str) -> None:
    config = Config.parse(config_json(size))
    entries = inventory(config, fp4_experts=True, mtp=True)
    tensors, nbytes, growth = PUBLISHED[size]
    assert len({entry.name for entry in entries}) == len(entries) == tensors
    assert sum(map(nbytes_of, entries)) == nbytes
    assert groups(config, bfloat16, (2, 2))[1].block_bytes == 128 * growth
    if size == "Flash":
        assert Counter(entry.dtype.name for entry in entries) == FLASH_DTYPES


def test_every_published_tensor_is_loaded_and_stays_packed() -> None:
    config, arena = Config.parse(config_json("Flash")), Arena(Device("null"), None)
    weights = Weights.allocate(config, arena, bfloat16, Format(fp4_experts=True, mtp=True))
    names = list(weights.places.names())
    entries = inventory(config, fp4_experts=True, mtp=True)
    assert sorted(names) == sorted(entry.name for entry in entries)
    assert arena.used == pytest.approx(sum(map(nbytes_of, entries)), rel=1e-3)
    plain = Weights.allocate(config, Arena(Device("null"), None), bfloat16, Format(fp4_experts=True))
    assert set(plain.places.names()) == {entry.name for entry in entries if not entry.name.startswith("mtp.")}


def test_a_model_cut_short_has_a_plan_for_a_million_tokens_on_a_gpu() -> None:
    source, options = (
        Source(config_json("Flash", layers=5)),
        RECIPE.options(max_num_seqs=8, max_model_len=1_048_576),
    )
    specs = kernel_specs(RECIPE, source, options, Target(90, 132, cublas=True, gpu="NVIDIA H200"))
    functions = {spec.function for spec in specs}
    assert {
        "compress",
        "sparse_attend_hopper",
        "index_scores",
        "experts_product",
        "hc_post",
        "route",
    } <= functions
    with pytest.raises(ContractError, match="sm_80"):
        kernel_specs(RECIPE, source, options, Target(80, 108, cublas=True))


def share(nbytes: int, **flags: Any) -> tuple[int, int]:
    """Pages of windows and of entries that five layers get of so many bytes on a GPU."""
    options = RECIPE.options(kv_cache_memory_bytes=nbytes, **flags)
    blueprint = RECIPE.blueprint(Source(config_json("Flash", layers=5)), options)
    limits = decide(options, Device("cuda"), blueprint)
    windows, entries = blueprint.share(limits, Room(nbytes, Device("cuda"), 0))
    return windows, entries


def test_memory_is_shared_between_the_groups() -> None:
    config = Config.parse(config_json("Flash", layers=5))
    window, entry = (group.block_bytes for group in groups(config, bfloat16, (2, 2)))
    plain = share(4 << 30, max_num_seqs=8)
    assert plain[0] == (4 << 30) // 2 // window
    assert plain[0] * window + plain[1] * entry <= 4 << 30
    # Entries for the longest sequence come first; its windows need no more pages than those of a short one.
    long = share(1 << 30, max_num_seqs=8, max_model_len=1_048_576)
    assert long[1] >= 8192 + 1
    assert 3 * 8 + 2 * 64 < long[0] < share(1 << 30, max_num_seqs=8)[0]
    assert long[0] * window + long[1] * entry <= 1 << 30
    bare = share(4 << 30, max_num_seqs=8, enable_prefix_caching=False)
    assert bare[0] == 3 * 8 + 2 * 64 + 1  # what rows and two steps need; all else is for entries
    assert bare[1] > plain[1]
    with pytest.raises(SetupError, match="no room for the cache"):
        share(3 * window, max_num_seqs=8)


def test_a_sequence_fits_the_cache() -> None:
    config = Config.parse(config_json("Flash", layers=5))
    chosen, default = RECIPE.options(max_model_len=1_048_576, max_num_seqs=8), RECIPE.options()
    capacity = {n: Pool(groups(config, bfloat16, (80, n))).capacity_tokens for n in (8193, 8192, 1001)}
    blueprint = RECIPE.blueprint(Source(config_json("Flash", layers=5)), default)
    limits = decide(chosen, Device("cuda"), blueprint)
    assert fit(limits, chosen, capacity[8193]) is limits
    with pytest.raises(
        SetupError, match=r"needs as many tokens of cache; there is room for 1048448: lower it"
    ):
        fit(limits, chosen, capacity[8192])
    shorter = decide(default, Device("cuda"), blueprint)
    assert fit(shorter, default, capacity[1001]).max_model_len == 128_000


def test_frequencies_of_layers_with_entries_are_slowed_from_channel_15_to_25() -> None:
    config = Config.parse(config_json("Flash"))
    plain = 160000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(config.compress_freq[:16], plain[:16], rtol=1e-5)
    np.testing.assert_allclose(config.compress_freq[25:], plain[25:] / 16, rtol=1e-5)
    np.testing.assert_allclose(config.compress_freq[20], plain[20] * (0.5 + 0.5 / 16), rtol=1e-5)
    np.testing.assert_allclose(config.main_freq, 10000.0 ** (-np.arange(32) / 32), rtol=1e-5)


def test_pages_are_what_the_pool_is_told() -> None:
    config = Config.parse(config_json("Flash"))
    for dtype in (bfloat16, float32):
        arenas = [Arena(Device("null"), None) for _ in range(3)]
        for arena, blocks in zip(arenas, ((8, 8), (9, 8), (8, 9)), strict=True):
            V4Cache.allocate(config, arena, dtype, blocks)
        kept = groups(config, dtype, (8, 8))
        assert [group.block_bytes for group in kept] == [a.used - arenas[0].used for a in arenas[1:]]
        assert kept[0].window == 127


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"\[64, 64\]"),
        ({"sliding_window": 256}, "sliding_window is 256"),
        ({"compress_ratios": [0, 0, 8, 128, 4]}, "compress_ratios is"),
        ({"compress_ratios": None}, "compress_ratios is None"),
        ({"compress_ratios": None, "layer_types": ["full"]}, "a converted form; take the published"),
        ({"compress_ratios": [0, 0, 4, 128]}, "compress_ratios is a list of 4; .* for each of 5 layers"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 0, 4]}, r"goes on with \[0, 4\] after 5 layers"),
        ({"compress_ratios": [0, 0, 4, 128, 4, None]}, r"goes on with \[None\] after 5 layers"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"hc_mult": 2}, "hc_mult is 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"rope_scaling": {"type": "linear"}}, "'linear'"),
        ({"hidden_size": 4000}, "hidden_size is 4000"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok is 300"),
        ({"o_groups": 7}, "7 o_groups"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0"),
        ({"index_head_dim": 96}, "index_head_dim is 96"),
        ({"eos_token_id": 200000}, "200000"),
    ],
)
def test_what_is_refused(change: dict[str, Any], names: str) -> None:
    raw = config_json("Flash", layers=5)
    with pytest.raises(UnsupportedModel, match=names):
        Config.parse({**raw, **change})


def test_the_recipe_knows_its_config() -> None:
    assert RECIPE.matches(config_json("Pro"))
    assert not RECIPE.matches({"model_type": "deepseek_v3"})


def write(path: Path, entries: list[Entry], scale: int = 120) -> None:
    """A checkpoint of zeros, and scales of one byte."""
    arrays = {}
    for name, shape, dtype in entries:
        fill = scale if dtype.name == "float8_e8m0fnu" else 0
        arrays[name] = np.full(math.prod(shape) * dtype.itemsize, fill, np.uint8).view(dtype).reshape(shape)
    path.mkdir()
    write_tensors(path / "model.safetensors", arrays)


@pytest.mark.parametrize("fp4", [True, False])
def test_experts_are_fp4_or_fp8_by_their_dtype(tmp_path: Path, fp4: bool) -> None:
    config = Config.parse(SMALL)
    entries = inventory(config, fp4_experts=fp4, mtp=False)
    write(tmp_path / "model", entries)
    with Checkpoint(tmp_path / "model") as checkpoint:
        form = Format.of(checkpoint)
        assert form == Format(fp4_experts=fp4)
        validate(checkpoint, config, form)
        with pytest.raises(CheckpointError, match=r"experts.0.w1.weight .* must be"):
            validate(checkpoint, config, Format(fp4_experts=not fp4))
    weights = Weights.allocate(config, Arena(Device("null"), None), bfloat16, form)
    gate_up = weights.layers[2].mixture.gate_up
    assert (gate_up.weight.dtype == uint8) == fp4
    assert gate_up.scales is not None
    assert gate_up.scales.shape == ((7, 256, 4) if fp4 else (7, 2, 1))


def test_a_checkpoint_that_lacks_or_adds_a_tensor_is_refused(tmp_path: Path) -> None:
    config = Config.parse(SMALL)
    entries = inventory(config, fp4_experts=True, mtp=False)
    lost = [e for e in entries if e.name != "layers.2.attn.indexer.compressor.ape"]
    added = [*entries, Entry("layers.0.attn.wk.weight", (2, 2), float32)]
    reshaped = [e._replace(shape=(3, 512)) if e.name == "hc_head_fn" else e for e in entries]
    problems = {
        "missing: layers.2.attn.indexer": lost,
        "unexpected: layers.0.attn.wk": added,
        "wrong shape: hc_head_fn": reshaped,
    }
    for n, (message, kept) in enumerate(problems.items()):
        write(tmp_path / str(n), kept)
        with Checkpoint(tmp_path / str(n)) as checkpoint, pytest.raises(CheckpointError, match=message):
            validate(checkpoint, config, Format(fp4_experts=True))


DSPARK = {
    "compress_ratios": [*SMALL["compress_ratios"], 0, 0, 0], "num_nextn_predict_layers": 1, "dspark_block_size": 5,
    "dspark_noise_token_id": 7, "dspark_target_layer_ids": [0, 1, 2], "dspark_markov_rank": 32,
}  # fmt: skip


def test_later_releases_have_the_same_model_and_another_drafter() -> None:
    for name, layers in (("Flash-0731", 43), ("Pro-0813", 61)):
        raw, config = config_json(name), Config.parse(config_json(name))
        assert len(raw["compress_ratios"]) == layers + 3
        assert config.ratios == Config.parse(config_json(name.partition("-")[0])).ratios
        assert (config.dspark, config.mtp) == (True, False)
    assert Config.parse(config_json("Flash-0731", layers=5)).dspark is False


@pytest.mark.parametrize("change", [DSPARK, {"num_nextn_predict_layers": 3}, {"num_nextn_predict_layers": 1}])
def test_layers_that_draft_are_skipped_whatever_they_are(change: dict[str, Any], tmp_path: Path) -> None:
    config = Config.parse({**SMALL, **change})
    assert config.ratios == Config.parse(SMALL).ratios
    names = ("mtp.0.main_proj.weight", "mtp.2.markov_head.markov_w1.weight", "mtp.0.anything")
    added = [Entry(name, (2, 2), float32) for name in names]
    write(tmp_path / "model", [*inventory(config, fp4_experts=True, mtp=False), *added])
    with Checkpoint(tmp_path / "model") as checkpoint:
        validate(checkpoint, config, Format(fp4_experts=True))
        if config.mtp:
            with pytest.raises(CheckpointError, match=r"missing: mtp\.0\.e_proj\.weight"):
                validate(checkpoint, config, Format(fp4_experts=True, mtp=True))
    options = RECIPE.options(speculative_config='{"method": "mtp", "num_speculative_tokens": 2}')
    if not config.mtp:
        has, use = ("a DSpark drafter", "dspark") if change is DSPARK else ("no layers that draft", "ngram")
        with pytest.raises(SetupError, match=f"has {has}.*needs an MTP layer; use method {use}"):
            RECIPE.blueprint(Source({**SMALL, **change}), options)


@pytest.mark.parametrize(("scale", "message"), [(120, ""), (129, r"experts.0.w1.scale.*2\^2"), (255, "NaN")])
def test_scales_that_kernels_do_not_take_are_refused(tmp_path: Path, scale: int, message: str) -> None:
    entries = inventory(Config.parse(SMALL), fp4_experts=True, mtp=False)
    write(tmp_path / "model", entries, scale)
    with Checkpoint(tmp_path / "model") as checkpoint:
        names = [entry.name for entry in entries if ".experts." in entry.name]
        if message:
            with pytest.raises(CheckpointError, match=message):
                check_scales(checkpoint, names)
        else:
            check_scales(checkpoint, names)


@pytest.mark.parametrize(("policy", "found"), [(eviction, 384), ("lru", 0)])
def test_a_long_prompt_does_not_evict_where_other_prompts_start(policy: Any, found: int) -> None:
    config = Config.parse(config_json("Flash"))
    pool = Pool(groups(config, bfloat16, (65, 1025)), eviction=policy)

    def computed(tokens: list[int]) -> int:
        with pool.acquire(tokens) as lease:
            for end in [*range(lease.num_cached + 512, len(tokens), 512), len(tokens)]:
                assert lease.reserve(end, len(tokens)) is not None
                lease.commit(tokens, end)
            return lease.num_cached

    prompt = list(range(400))
    assert [computed(prompt), computed(prompt)] == [0, 384]
    computed([7] * 40_000)  # 313 pages, where there are 64
    assert computed(prompt) == found


def test_few_pages_for_windows_are_said(caplog: pytest.LogCaptureFixture) -> None:
    page = groups(Config.parse(config_json("Flash", layers=5)), bfloat16, (2, 2))[0].block_bytes
    for pages, said in ((950, 0), (700, 1)):  # 256 rows with 3 pages each, and two steps of 8,192 tokens
        share(2 * pages * page)
        assert len(caplog.records) == said
    assert "699 pages for windows, where 256 sequences in full steps use 896" in caplog.text
