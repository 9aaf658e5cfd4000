"""Accuracy gates of packed weights, quantised activations, the FP8 cache and adapters, on small random checkpoints.

An engine on the GPU is compared with the same engine in numpy, as in `selftest_model`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.cli.bench import idle
from openinfer.cli.selftest import gate
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Session, write_random_checkpoint
from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.recipes.engine.verdict import Check, Reference, judge, limits
from openinfer.tensor import Checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = CONFIG | {
    "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 4096,
}  # fmt: skip
"""A model whose products of few tokens go to clusters of blocks (openinfer.kernels.linear.choices.cluster_choice)."""
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SHAPE_4B = WIDE | {
    "hidden_size": 2560, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 9728,
}  # fmt: skip
"""Two layers of Qwen3-4B."""


def _compressed(form: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> Mapping[str, Any]:
    weights = {"symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
ROWS = _compressed("float-quantized", FLOAT8, num_bits=8, type="float", strategy="channel")
INT4 = _compressed(
    "pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=128
)
NVFP4 = _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MXFP4 = _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT8 = _compressed("int-quantized", BY_TOKEN, num_bits=8, type="int", strategy="channel")
RANK, TARGETS = 16, ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


class _Format(NamedTuple):
    """A quantization_config, or None, and the flags of the engine."""

    quantization: Mapping[str, Any] | None
    flags: Mapping[str, Any] = {}


FORMATS = {
    "INT4 with zero points": _Format(INT4),
    "FP8 in blocks": _Format(BLOCKS, {"activation_quantization": "off"}),
    "FP8 in blocks, activations too": _Format(BLOCKS),
    "FP8 by row, activations too": _Format(ROWS),
    "NVFP4": _Format(NVFP4),
    "MXFP4": _Format(MXFP4),
    "INT8": _Format(INT8, {"activation_quantization": "off"}),
    "INT8, activations too": _Format(INT8),
    "FP8 cache": _Format(None, {"kv_cache_dtype": "fp8"}),
}

WIDER = {
    "INT4 with zero points": WIDE, "FP8 in blocks, activations too": WIDE, "FP8 by row, activations too": WIDE,
    "NVFP4": SHAPE_4B, "INT8, activations too": SHAPE_4B,
}  # fmt: skip
"""Formats that run in a wider model too, where products of few tokens have kernels of their own."""


def checks(
    folder: Path, name: str, device: str = "auto", config: Mapping[str, Any] = CONFIG
) -> tuple[list[Check], list[Check]]:
    """The verdicts on every path of a format, and those on engines that are wrong on purpose."""
    quantization, flags = FORMATS[name]
    written = dict(config) | ({"quantization_config": quantization} if quantization else {})
    model = write_random_checkpoint(recipe := idle.recipes_that_can()["qwen3"], folder, written)
    references = gate.references(recipe, model, **flags)
    built = build(recipe, model, device=device, **{**gate.SMALL, **flags}, kv_cache_memory_bytes=1 << 28)
    found = list(gate.run(built, references)), list(gate.negative_controls(built, references))
    built.engine.close()
    return found


def adapters(folder: Path, device: str = "auto") -> tuple[list[Check], list[Check]]:
    """Log-probabilities of prompts with two adapters; as a control each with the other one's reference."""
    model = write_random_checkpoint(recipe := idle.recipes_that_can()["qwen3"], folder / "model", CONFIG)
    names = ["one", "two"]
    for seed, name in enumerate(names, start=1):
        _write_adapter(model, folder / name, seed)
    flags: dict[str, Any] = {
        **gate.SMALL, "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK,
        "lora_modules": [f"{name}={folder / name}" for name in names], "kv_cache_memory_bytes": 1 << 28,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG["vocab_size"], size).tolist() for size in (40, 129, 7, 300)]

    def run(of: Sequence[str], where: str, dtype: str) -> list[np.ndarray[Any, Any]]:
        session = Session(build(recipe, model, device=where, dtype=dtype, **flags).engine)
        asked: dict[str, Any] = {"prompt_logprobs": 0, "ignore_eos": True}
        ids = [session.submit(prompt, 1, adapter=of[n % 2], **asked) for n, prompt in enumerate(prompts)]
        session.finish()
        session.engine.close()
        return [np.array([[one.logprob] * 2 for one in session.outcomes[n].prompt_logprobs]) for n in ids]

    bf16, fp32 = (run(names, "cpu", dtype) for dtype in ("bfloat16", "float32"))
    references = [
        Reference(prompt, np.array([prompt[1:]] * 2, np.int32).T, a, b)  # one id, twice: no other is known
        for prompt, a, b in zip(prompts, bf16, fp32, strict=True)
    ]

    def judged(path: str, of: Sequence[str]) -> Check:
        rows = run(of, device, "auto")
        found = [np.concatenate([row, np.zeros((len(row), 1))], 1) for row in rows]
        return judge(path, limits(references), references, found)

    return [judged("two adapters", names)], [judged("control: two adapters swapped", names[::-1])]


def _write_adapter(model: Path, folder: Path, seed: int) -> None:
    rng, tensors = np.random.default_rng(seed), {}
    with Checkpoint(model) as checkpoint:
        shapes = {name: checkpoint.info(name).shape for name in checkpoint.names}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            (rows, columns), at = shape, f"base_model.model.{module}"
            a = rng.standard_normal((RANK, columns)) / columns**0.5
            b = rng.standard_normal((rows, RANK)) / RANK**0.5
            tensors[f"{at}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def every(folder: Path, device: str = "auto") -> Iterator[tuple[str, list[Check], list[Check]]]:
    """Each format, with its verdicts and those of its controls; codes in a wide model too; then adapters."""
    for number, name in enumerate(FORMATS):
        yield name, *checks(folder / str(number), name, device)
        if name in WIDER:
            yield f"{name}, wide", *checks(folder / f"{number}-wide", name, device, WIDER[name])
    yield "adapters", *adapters(folder / "adapters", device)
