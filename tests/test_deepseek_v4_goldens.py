"""The DeepSeek-V4 recipe against the float32 goldens: hidden states, logits with and without the published rounding,
the MTP layer, greedy tokens in any batch and any chunks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_rows import TapPack, last_logits, start_row

from openinfer.kernels import CpuPack, Op, select_rows
from openinfer.kernels.formats.linear import Linear
from openinfer.kernels.packs.forks import forks
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.deepseek_v4.config import CSA, HCA
from openinfer.recipes.deepseek_v4.model import Model
from openinfer.recipes.deepseek_v4.weights import Format
from openinfer.tensor import (
    Checkpoint,
    Tensor,
    bfloat16,
    dtypes,
    float8_e4m3fn,
    float8_e8m0fnu,
    float32,
    uint8,
)

TOLERANCE = 1e-3
STEADY = (0, 1, 2)
"""Prompts in which no FP8 code flips for a change in the last bit (`actq_jitter_max` of golden.json is tiny)."""


class Tap(TapPack):
    """Keeps a copy of what the indexer selects, too."""

    def __init__(self) -> None:
        super().__init__({"spread": "streams", "hc_post": "streams"})
        self.selected: list[np.ndarray[Any, Any]] = []

    def run(self, op: Op[Any], args: Any) -> None:
        super().run(op, args)
        if op.name == "index_topk":
            self.selected.append(args.selected.numpy().copy())


@pytest.fixture
def load_model(place: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """load_model(path, quantized, dtype, mtp, max_rows)"""

    def load(
        path: Path, *, quantized: bool = False, dtype: Any = float32, mtp: bool = False, max_rows: int = 16
    ) -> Model:
        if mtp:
            monkeypatch.setattr(Format, "of", lambda checkpoint: Format(fp4_experts=True, mtp=True))
        rounding = "on" if quantized else "off"
        model: Model = place(
            RECIPE, path, [9, 9], dtype=dtype, max_rows=max_rows, activation_quantization=rounding
        )
        return model

    return load


def test_hidden_states_and_logits(load_model, deepseek):
    facts = deepseek.facts["hidden"]
    prompt = deepseek.prompt(facts["prompt"])
    model, pack = load_model(deepseek.path), Tap()
    start_row(model, prompt)
    model.forward(pack, len(prompt), 1, len(prompt))
    assert len(pack.streams) == 1 + 2 * model.config.num_layers
    named = {"hidden.embed": pack.streams[0][:, 0]}
    named |= {f"hidden.layer{n}": pack.streams[2 * n + 2] for n in range(model.config.num_layers)}
    for name, stream in named.items():
        got = stream[facts["positions"]]
        np.testing.assert_allclose(
            got, deepseek.numbers[name].reshape(got.shape), atol=TOLERANCE, rtol=0, err_msg=name
        )
    expected = deepseek.numbers[f"p{facts['prompt']}.logits_fp32"][-1]
    np.testing.assert_allclose(model.batch.logits.numpy()[0], expected, atol=TOLERANCE, rtol=0)
    chosen = [taken[facts["positions"]] for taken in pack.selected]
    assert len(chosen) == model.config.count(4)
    assert all((taken >= 0).all() for taken in chosen)  # the indexer had to choose
    assert any((np.sort(taken) != np.arange(taken.shape[1])).any() for taken in chosen)


@pytest.mark.parametrize("index", range(5))
def test_logits_of_stored_positions(load_model, deepseek, index):
    prompt, expected = deepseek.prompt(index), deepseek.numbers[f"p{index}.logits_fp32"]
    positions = deepseek.facts["prompts"][index]["logit_positions"]
    model = load_model(deepseek.path)
    for position, row in list(zip(positions, expected, strict=True))[-2:]:
        np.testing.assert_allclose(last_logits(model, prompt[: position + 1]), row, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("index", range(5))
def test_logits_with_the_published_rounding(load_model, deepseek, index):
    """Where a code of FP8 or FP4 may flip for a last bit, everything after it in the prompt moves: there only the size
    of the difference is compared (the goldens' README)."""
    prompt, expected = deepseek.prompt(index), deepseek.numbers[f"p{index}.logits_fp32_actq"]
    positions = deepseek.facts["prompts"][index]["logit_positions"]
    plain = deepseek.numbers[f"p{index}.logits_fp32"]
    model = load_model(deepseek.path, quantized=True)
    for at in range(len(positions))[-2:]:
        logits = last_logits(model, prompt[: positions[at] + 1])
        error = np.abs(logits - expected[at])
        if index in STEADY:
            assert deepseek.facts["prompts"][index]["actq_jitter_max"] < 1e-5
            assert error.max() < 1e-2
        assert np.sqrt(np.mean(error**2)) < 0.5
        assert np.abs(logits - plain[at]).max() > 0.1  # the rounding is there


class Noted:
    """Notes calls."""

    def __init__(self) -> None:
        self.calls = list[tuple[Op[Any], Any]]()

    def run(self, op: Op[Any], args: Any) -> None:
        self.calls.append((op, args))


@pytest.mark.parametrize("quantized", [False, True])
def test_branches_of_a_step_do_not_depend_on_each_other(load_model, deepseek, quantized):
    prompt, found = deepseek.prompt(1)[:200], []
    for swapped in False, True:
        model, noted, pack = (
            load_model(deepseek.path, quantized=quantized),
            Noted(),
            CpuPack(batch_invariant=True),
        )
        start_row(model, prompt)
        model.forward(noted, len(prompt), 1, len(prompt))
        calls, branches = noted.calls, forks(noted.calls)
        for first, second in branches if swapped else []:
            calls[first.start : second.stop] = [*calls[second], *calls[first]]
        for op, args in calls:
            pack.run(op, args)
        found.append(
            [
                model.batch.logits.numpy()[0],
                *(getattr(model.cache, field.name).numpy() for field in fields(model.cache)),
            ]
        )
    ratios = model.config.ratios
    assert len(branches) == len(ratios) + ratios.count(HCA) + 2 * ratios.count(CSA)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def halved_sinks(model: Model) -> None:
    """A denominator without its sink."""
    for layer in model.weights.layers:
        layer.attention.heads.sinks.numpy()[:] -= 1


def one_frequency_set(model: Model) -> None:
    """Layers with compressed entries rotated as those without."""
    model.compress_cos_sin.numpy()[:] = model.cos_sin.numpy()


def swapped_halves(model: Model) -> None:
    """An ape whose rows are those of the window shifted by one token."""
    for layer in model.weights.layers:
        if layer.attention.entries is not None:
            ape = layer.attention.entries.compressor.ape.numpy()
            ape[:] = np.roll(ape, 1, axis=0)


def untransposed_mixing(model: Model) -> None:
    """The matrix that mixes the streams, transposed."""
    for layer in model.weights.layers:
        fn, base = layer.ffn_mixing.fn.numpy(), layer.ffn_mixing.base.numpy()
        order = [8 + 4 * k + j for j in range(4) for k in range(4)]
        fn[8:], base[8:] = fn[order].copy(), base[order].copy()


def other_experts(model: Model) -> None:
    """A hash table of other token ids."""
    table = next(la.mixture.table for la in model.weights.layers if la.mixture.table is not None).numpy()
    table[:] = np.roll(table, 1, axis=0)


@pytest.mark.parametrize(
    "spoil", [halved_sinks, one_frequency_set, swapped_halves, untransposed_mixing, other_experts]
)
def test_a_wrong_model_is_noticed(load_model, deepseek, spoil):
    """Negative controls: the comparison above fails."""
    prompt, expected = deepseek.prompt(2), deepseek.numbers["p2.logits_fp32"][-1]
    model = load_model(deepseek.path)
    assert np.abs(last_logits(model, prompt) - expected).max() < TOLERANCE
    spoil(model)
    assert np.abs(last_logits(model, prompt) - expected).max() > 5 * TOLERANCE


def test_packed_weights_in_bf16_are_as_close_as_the_reference_in_bf16(load_model, deepseek):
    """A bf16 model keeps FP8 and FP4 weights packed. Positions with an expert or an entry all but tied are left out."""
    model, ours, theirs = load_model(deepseek.path, dtype=bfloat16), [], []
    packed = model.weights.layers[0].mixture.gate_up
    assert packed.weight.dtype == uint8
    assert packed.weight.shape[-1] == model.config.hidden_size // 2
    for index in (1, 2):
        positions = deepseek.facts["prompts"][index]["logit_positions"]
        fp32, bf16 = deepseek.numbers[f"p{index}.logits_fp32"], deepseek.numbers[f"p{index}.logits_bf16"]
        margins = np.minimum(
            deepseek.numbers[f"p{index}.route_margin"], deepseek.numbers[f"p{index}.index_margin"]
        )
        for position, exact, rounded in zip(positions, fp32, bf16, strict=True):
            if margins[: position + 1].min() > 0.01:
                logits = last_logits(model, deepseek.prompt(index)[: position + 1])
                ours.append(np.sqrt(np.mean((logits - exact) ** 2)))
                theirs.append(np.sqrt(np.mean((rounded - exact) ** 2)))
    assert len(ours) > 3
    assert 0 < np.median(ours) < 1.5 * np.median(theirs)


def model_head(model, pack, ends):
    """The MTP layer's logits after the tokens ends[1:] - 1."""
    rows = len(ends) - 1
    last, ends = model.batch.last[:rows], Tensor.from_numpy(ends)
    select_rows(pack, out=last, x=model.hidden[: model.batch.token_ids.shape[0]], q_starts=ends)
    model.draft_head(pack, rows, 1)


def test_the_mtp_layer_predicts_the_token_after_next(load_model, deepseek):
    facts = deepseek.facts["mtp"]
    prompt, positions = deepseek.prompt(facts["prompt"]), facts["positions"]
    model, pack = load_model(deepseek.path, mtp=True), CpuPack()
    count = len(prompt) - 1
    start_row(model, prompt[:-1])
    model.forward(pack, count, 1, count)
    following = Tensor.from_numpy(np.array(prompt[1:], np.int32))
    model.further(pack, following, model.batch.step(count, 1), count, first=True)
    ends = np.array([0, *(position + 1 for position in positions)], np.int32)
    model_head(model, pack, ends)
    logits = model.batch.logits.numpy()[: len(positions)].copy()
    np.testing.assert_allclose(logits, deepseek.numbers["mtp.logits_fp32"], atol=TOLERANCE, rtol=0)
    ends[1:] -= 1  # negative control: of the tokens before
    model_head(model, pack, ends)
    again = model.batch.logits.numpy()[: len(positions)]
    assert np.abs(again - deepseek.numbers["mtp.logits_fp32"]).max() > 0.1


def with_fp8_experts(source: Path, target: Path) -> None:
    """The checkpoint with its experts in FP8, as Base checkpoints have them: the same values exactly."""
    tensors = {}
    with Checkpoint(source) as checkpoint:
        for name in checkpoint:
            array = np.array(checkpoint.array(name))
            if ".experts." not in name:
                tensors[name] = array
            elif name.endswith(".weight"):
                scales = checkpoint.array(name.removesuffix("weight") + "scale").view(np.uint8)
                wide = Linear(array.view(np.uint8), scales).values()
                rows, columns = (size // 128 for size in wide.shape)
                tiles = wide.reshape(rows, 128, columns, 128).swapaxes(1, 2)
                exponent = np.ceil(np.log2(np.abs(tiles).max(axis=(2, 3)) / 448)).astype(np.int32)
                small = (tiles / np.float32(2) ** exponent[:, :, None, None]).astype(float8_e4m3fn)
                weight = small.swapaxes(1, 2).reshape(wide.shape)
                codes = (exponent + 127).astype(np.uint8)
                np.testing.assert_array_equal(Linear(weight, codes).values(), wide)
                tensors[name] = weight
                tensors[name.removesuffix("weight") + "scale"] = codes.view(float8_e8m0fnu)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    header, offset = {}, 0
    for name, array in tensors.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": dtypes.tag(array.dtype), "shape": list(array.shape), "data_offsets": span}
        offset += array.nbytes
    text = json.dumps(header).encode()
    with (target / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def test_experts_in_fp8_are_the_same_model(load_model, deepseek, session, tmp_path):
    with_fp8_experts(deepseek.path, tmp_path / "base")
    prompt, expected = deepseek.prompt(2), deepseek.numbers["p2.logits_fp32"][-1]
    model = load_model(tmp_path / "base")
    np.testing.assert_allclose(last_logits(model, prompt), expected, atol=TOLERANCE, rtol=0)
    packed = load_model(tmp_path / "base", dtype=bfloat16)
    assert packed.weights.layers[1].mixture.down.weight.dtype == float8_e4m3fn
    fp4 = load_model(deepseek.path, dtype=bfloat16)
    np.testing.assert_array_equal(last_logits(packed, prompt), last_logits(fp4, prompt))
    for ranks in (1, 2):
        run = session(tmp_path / "base", activation_quantization="off", tensor_parallel_size=ranks)
        run.submit(deepseek.prompt(1), 32, ignore_eos=True)
        run.finish()
        assert run.outcomes[0].tokens == deepseek.greedy(1)
