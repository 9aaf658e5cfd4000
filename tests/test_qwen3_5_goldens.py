"""The Qwen3.5 recipe against the float32 goldens, dense and with experts: hidden states, logits, greedy tokens, in any
batch and any chunks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_rows import TapPack, last_logits, start_row

from openinfer.kernels import CpuPack
from openinfer.kernels.op.reference import rms_norm
from openinfer.kernels.testing import of_the_day
from openinfer.recipes.engine import UnsupportedModel
from openinfer.recipes.qwen3_5 import RECIPE
from openinfer.recipes.qwen3_5.model import Model
from openinfer.recipes.qwen3_5.weights import DeltaNet, Format, Mixture
from openinfer.tensor import Checkpoint, Tensor, bfloat16, float8_e4m3fn, float32

TOLERANCE = 1e-3
CHANGED = {"embed": "out", "linear_add": "x", "experts_add": "x"}
"""The ops that change the residual stream, and their name for it."""


@pytest.fixture
def load_model(place: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """load_model(path, max_tokens, dtype, mtp)"""
    of = Format.of

    def load(
        path: Path, max_tokens: int = 512, dtype: Any = float32, mtp: bool = False, **flags: Any
    ) -> Model:
        with monkeypatch.context() as patch:
            patch.setattr(Format, "of", lambda *given: replace(of(*given), mtp=mtp))
            model: Model = place(RECIPE, path, [65, 5], max_tokens=max_tokens, dtype=dtype, **flags)
        return model

    return load


def test_hidden_states_and_logits(load_model, hybrid):
    facts = hybrid.facts["hidden"]
    prompt = hybrid.prompt(facts["prompt"])
    model, pack = load_model(hybrid.path), TapPack(CHANGED)
    start_row(model, prompt)
    model.forward(pack, len(prompt), 1, len(prompt))
    additions = 3 if model.config.experts else 2
    after = [pack.streams[0], *pack.streams[additions::additions]]
    names = ["hidden.embed", *(f"hidden.layer{n}" for n in range(len(model.config.full)))]
    assert len(after) == len(names)
    for name, stream in zip(names, after, strict=True):
        np.testing.assert_allclose(
            stream[facts["positions"]], hybrid.numbers[name], atol=TOLERANCE, rtol=0, err_msg=name
        )
    expected = hybrid.numbers[f"p{facts['prompt']}.logits_fp32"][-1]
    np.testing.assert_allclose(model.batch.logits.numpy()[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("index", range(5))
def test_logits_of_stored_positions(load_model, hybrid, index):
    """Each stored position as the last one of a prompt: also what state and cache filled token by token must give."""
    prompt, expected = hybrid.prompt(index), hybrid.numbers[f"p{index}.logits_fp32"]
    positions = hybrid.facts["prompts"][index]["logit_positions"]
    model = load_model(hybrid.path)
    for position, row in list(zip(positions, expected, strict=True))[-3:]:
        np.testing.assert_allclose(last_logits(model, prompt[: position + 1]), row, atol=TOLERANCE, rtol=0)


def swap_heads(model: Model) -> None:
    """Value heads that tile over key heads, where they have to be neighbours: the decay of heads 1 and 2 swapped."""
    for layer in model.weights.layers:
        if isinstance(layer.mixer, DeltaNet):
            decay = layer.mixer.decay.numpy()
            decay[[1, 2]] = decay[[2, 1]]


def plain_norms(model: Model) -> None:
    """w where it is 1 + w."""
    model.weights.layers[0].input_norm.numpy()[:] -= 1


def fast_rotation(model: Model) -> None:
    """Each position rotated twice as far."""
    table = model.cos_sin.numpy()
    table[: len(table) // 2] = table[: len(table) // 2 * 2 : 2].copy()


def open_gate(model: Model) -> None:
    """A shared expert without its gate, or an MLP without its last row."""
    mlp = model.weights.layers[1].mlp
    if isinstance(mlp, Mixture):
        mlp.router.weight.numpy()[mlp.down.weight.shape[0]] = 0
    else:
        mlp.down.weight.numpy()[-1] = 0


@pytest.mark.parametrize("spoil", [swap_heads, plain_norms, fast_rotation, open_gate])
def test_a_wrong_model_is_noticed(load_model, hybrid, spoil):
    """Negative controls: the comparison above fails."""
    prompt, expected = hybrid.prompt(2), hybrid.numbers["p2.logits_fp32"][-1]
    model = load_model(hybrid.path)
    assert np.abs(last_logits(model, prompt) - expected).max() < TOLERANCE
    spoil(model)
    assert np.abs(last_logits(model, prompt) - expected).max() > 5 * TOLERANCE


def test_bf16_is_as_close_as_the_reference_in_bf16(load_model, hybrid):
    """On the CPU in bf16; positions where an expert is all but tied are left out, as the goldens' README says."""
    model, ours, theirs = load_model(hybrid.path, dtype=bfloat16), [], []
    for index in (1, 2):
        positions = hybrid.facts["prompts"][index]["logit_positions"]
        fp32, bf16 = hybrid.numbers[f"p{index}.logits_fp32"], hybrid.numbers[f"p{index}.logits_bf16"]
        margins = hybrid.numbers.get(f"p{index}.route_margin", np.ones(len(hybrid.prompt(index))))
        for position, exact, rounded in zip(positions, fp32, bf16, strict=True):
            if margins[: position + 1].min() > 0.01:
                logits = last_logits(model, hybrid.prompt(index)[: position + 1])
                ours.append(np.sqrt(np.mean((logits - exact) ** 2)))
                theirs.append(np.sqrt(np.mean((rounded - exact) ** 2)))
    assert len(ours) > 7
    assert 0 < np.median(ours) < 1.5 * np.median(theirs)


def test_the_mtp_weights_are_the_published_head(load_model, hybrid):
    """They give the goldens' logits of the token after next. An engine that does not draft with them loads none."""
    assert load_model(hybrid.path).weights.mtp is None
    if hybrid.facts["mtp"] is None:
        return
    facts = hybrid.facts["mtp"]
    prompt = hybrid.prompt(facts["prompt"])
    model, pack = load_model(hybrid.path, mtp=True), CpuPack()
    mtp, b, eps, count = model.weights.mtp, model.buffers, model.config.rms_norm_eps, len(prompt) - 1
    start_row(model, prompt[:-1])
    model.forward(pack, count, 1, count)
    following = Tensor.from_numpy(np.array(prompt[1:], np.int32))
    model.further(pack, following, model.batch.step(count, 1), count, first=True)
    normed = rms_norm(b.x.numpy()[:count], mtp.norm.numpy(), eps)
    logits = normed[facts["positions"]] @ model.weights.lm_head.numpy().T
    np.testing.assert_allclose(logits, hybrid.numbers["mtp.logits_fp32"], atol=TOLERANCE, rtol=0)


def test_a_text_only_config_of_flat_keys(hybrid, session, tmp_path):
    """The same weights as a derivative without a vision tower spells them."""
    raw = json.loads((hybrid.path / "config.json").read_text())
    flat = {**raw["text_config"], "tie_word_embeddings": raw["tie_word_embeddings"]}
    folder = tmp_path / "flat"
    shutil.copytree(hybrid.path, folder)
    (folder / "config.json").write_text(json.dumps(flat))
    with Checkpoint(hybrid.path) as checkpoint:
        tensors = {
            name.replace("model.language_model.", "model."): checkpoint.array(name)
            for name in checkpoint
            if not name.startswith("model.visual.")
        }
        write_safetensors(folder / "model.safetensors", tensors)
    run = session(folder)
    run.submit(hybrid.prompt(1), 32, ignore_eos=True)
    run.finish()
    assert run.outcomes[0].tokens == hybrid.greedy(1)


def quantized(weight: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """A BF16 weight [N, K] by the published scheme (e4m3, a scale for each block of 128 x 128, stored in BF16), and
    what the two mean. The scales are powers of two, so that BF16 can hold the meaning too."""
    wide, (n, k) = weight.astype(np.float32), weight.shape
    scales = np.zeros((-(-n // 128), -(-k // 128)), np.float32)
    values, meant = np.zeros((n, k), float8_e4m3fn), np.zeros((n, k), np.float32)
    for i, j in np.ndindex(*scales.shape):
        block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        scales[i, j] = 2.0 ** np.ceil(np.log2(np.abs(wide[block]).max() / 448))
        values[block] = (wide[block] / scales[i, j]).astype(float8_e4m3fn)
        meant[block] = values[block].astype(np.float32) * scales[i, j]
    return values, scales.astype(bfloat16), meant.astype(bfloat16)


def quantized_by_row(weight: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """As `quantized`, with a scale for each row, [N, 1]."""
    wide = weight.astype(np.float32)
    scales = 2.0 ** np.ceil(np.log2(np.abs(wide).max(axis=1, keepdims=True) / 448))
    values = (wide / scales).astype(float8_e4m3fn)
    return values, scales.astype(bfloat16), (values.astype(np.float32) * scales).astype(bfloat16)


def write_fp8(source: Path, fp8: Path, bf16: Path, by_row: bool = False) -> None:
    """A golden's checkpoint quantised as published ones are, or as compressed-tensors does by channel; and one in BF16
    that means the same."""
    kept = (
        "embed",
        "norm",
        "conv1d",
        "A_log",
        "dt_bias",
        "in_proj_a",
        "in_proj_b",
        "mlp.gate.",
        "shared_expert_gate",
    )
    small, same = {}, {}
    with Checkpoint(source) as checkpoint:
        for name in checkpoint:
            array = np.array(checkpoint.array(name))
            small[name] = same[name] = array
            if any(part in name for part in (*kept, "visual", "lm_head", "mtp.fc")):
                continue
            modules = {name.removesuffix(".weight"): array}
            if ".experts." in name:
                del small[name]
                modules = dict(experts_apart(name, array))
            meant = []
            for module, weight in modules.items():
                values, scales, means = (quantized_by_row if by_row else quantized)(weight)
                ending = ".weight_scale" if by_row else ".weight_scale_inv"
                small[module + ".weight"], small[module + ending] = values, scales
                meant.append(means)
            same[name] = np.stack(meant).reshape(array.shape)
    raw = json.loads((source / "config.json").read_text())
    scheme = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    if by_row:
        float8 = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "channel"}
        scheme = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": float8}}}
    for folder, tensors, config in ((fp8, small, {**raw, "quantization_config": scheme}), (bf16, same, raw)):
        shutil.copytree(source, folder)
        write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(config))


def experts_apart(name: str, array: np.ndarray[Any, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    at, kind = name.rsplit(".", 1)
    for expert, weight in enumerate(array):
        if kind == "down_proj":
            yield f"{at}.{expert}.down_proj", weight
        else:
            yield from zip(
                (f"{at}.{expert}.gate_proj", f"{at}.{expert}.up_proj"), np.split(weight, 2), strict=True
            )


@pytest.mark.parametrize("by_row", of_the_day([False, True]))
def test_fp8_weights_stay_fp8_and_mean_what_their_scales_say(load_model, hybrid, session, tmp_path, by_row):
    write_fp8(hybrid.path, tmp_path / "fp8", tmp_path / "bf16", by_row)
    if by_row and "moe" in hybrid.path.name:
        with pytest.raises(UnsupportedModel, match="experts take blocks of 128 x 128"):
            load_model(tmp_path / "fp8")
        return
    plain = {"activation_quantization": "off"}
    small, same = load_model(tmp_path / "fp8", **plain), load_model(tmp_path / "bf16")
    scaled = [load.dst for load in small.weights.places.loads if load.dst.dtype == float8_e4m3fn]
    assert len(scaled) > 10
    assert not any(load.dst.dtype == float8_e4m3fn for load in same.weights.places.loads)
    prompt = hybrid.prompt(2)
    got, want = last_logits(small, prompt), last_logits(same, prompt)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
    exact = hybrid.numbers["p2.logits_fp32"][-1]
    error = np.sqrt(np.mean((got - exact) ** 2))
    # Of logits with a standard deviation of 2.5: quantised, and still the same model.
    assert 0.01 < error < 1.0
    small.weights.layers[-1].mixer.qkv.scales.numpy()[-1] *= 2  # negative control
    assert np.abs(last_logits(small, prompt) - want).max() > 1e-2
    runs = [session(tmp_path / name, max_num_batched_tokens=50, **plain) for name in ("fp8", "bf16")]
    runs.append(session(tmp_path / "fp8", tensor_parallel_size=2, **plain))
    for run in runs:
        for index in range(4):
            run.submit(hybrid.prompt(index), 16, ignore_eos=True)
        run.finish()
    for index in range(4):
        assert len({tuple(run.outcomes[index].tokens) for run in runs}) == 1


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """A safetensors file, by hand: numpy has no names for bf16 and e4m3."""
    tags = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": tags[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
