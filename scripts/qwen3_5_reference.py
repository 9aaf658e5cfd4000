"""Write a Qwen3.5 checkpoint of a published shape with seeded random weights, and what transformers says of it.

    python scripts/qwen3_5_reference.py --shape 4b --out DIR [--layers N] [--fp8] [--device cuda]

Needs torch and transformers, which no distribution of this project does: it makes test data. DIR gets the checkpoint of
the text model in the published format (flat config, two shards and an index) and reference.npz, which
openinfer.recipes.engine.gate reads: token sequences, and at the last positions of each the reference's 64 most likely
tokens with their log-probabilities in bf16 and in float32. With --fp8 the checkpoint is quantised by the published
scheme (e4m3, a BF16 scale for each block of 128 x 128), and the reference runs on what these weights mean.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {  # hidden, layers, heads, kv heads, linear value heads, MLP or (experts, chosen, width), tied
    "tiny": (256, 4, 4, 2, 32, 384, True),
    "tiny-moe": (256, 4, 4, 2, 32, (16, 4, 128), False),
    "0.8b": (1024, 24, 8, 2, 16, 3584, True),
    "2b": (2048, 24, 8, 2, 16, 6144, True),
    "4b": (2560, 32, 16, 4, 32, 9216, True),
    "9b": (4096, 32, 16, 4, 32, 12288, False),
    "35b-a3b": (2048, 40, 16, 2, 32, (256, 8, 512), False),
}
LENGTHS = (1, 5, 64, 129, 300, 1000, 2048, 8192)
"""Prompt lengths; FORCED more tokens follow each."""
FORCED = 24
TOP = 64
LOGIT_STD = 2.5
NEVER_FP8 = (
    "embed_tokens",
    "lm_head",
    "norm",
    "conv1d",
    "A_log",
    "dt_bias",
    "in_proj_a",
    "in_proj_b",
    "mlp.gate.",
)
NEVER_FP8 += ("shared_expert_gate",)
OUTPUTS = ("o_proj", "out_proj", "down_proj")
"""What adds to the residual stream."""


def config_of(shape: str, layers: int | None) -> dict[str, Any]:
    """config.json of the text model."""
    hidden, num_layers, heads, kv_heads, value_heads, mlp, tied = SHAPES[shape]
    tiny = shape.startswith("tiny")
    num_layers = layers or num_layers
    raw = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 1024 if tiny else 248320,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(num_layers)],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": tied,
        "eos_token_id": 2 if tiny else 248046,
        "dtype": "bfloat16",
    }
    if isinstance(mlp, int):
        return raw | {"intermediate_size": mlp}
    experts, chosen, width = mlp
    return raw | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


class Random:
    """Seeded tensors. Projections keep the variance; norm weights vary around what leaves values alone."""

    def __init__(self, device: str, seed: int) -> None:
        self.generator, self.device = torch.Generator(device).manual_seed(seed), device

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.device)
        return (mean + drawn * std).to(torch.bfloat16)

    def uniform(self, size: int, low: float, high: float) -> torch.Tensor:
        drawn = torch.rand(size, generator=self.generator, device=self.device)
        return (low + drawn * (high - low)).to(torch.bfloat16)

    def linear(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(*shape, std=gain / math.sqrt(shape[-1]))


def random_weights(c: dict[str, Any], device: str, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by published name, in the published dtypes; the head is scaled for logits of standard deviation 2.5."""
    r, h = Random(device, seed), c["hidden_size"]
    head_std = LOGIT_STD / math.sqrt(h)
    weights = {"model.embed_tokens.weight": r.normal(c["vocab_size"], h, std=head_std)}
    for n, kind in enumerate(c["layer_types"]):
        at = f"model.layers.{n}."
        weights[at + "input_layernorm.weight"] = r.normal(h, std=0.1)  # applied as 1 + w
        weights[at + "post_attention_layernorm.weight"] = r.normal(h, std=0.1)
        mixer = attention(r, c) if kind == "full_attention" else delta_net(r, c)
        for name, tensor in (*mixer, *mlp(r, c)):
            # Later layers add less, as in trained models: with equal shares bf16's errors pile up over the layers.
            weights[at + name] = tensor / (1 + n / 2) if any(part in name for part in OUTPUTS) else tensor
    weights["model.norm.weight"] = r.normal(h, std=0.1)
    if not c["tie_word_embeddings"]:
        weights["lm_head.weight"] = r.normal(c["vocab_size"], h, std=head_std)
    return weights


def attention(r: Random, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    h, d, heads, kv = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    yield "self_attn.q_proj.weight", r.linear(2 * heads * d, h)
    yield "self_attn.k_proj.weight", r.linear(kv * d, h)
    yield "self_attn.v_proj.weight", r.linear(kv * d, h)
    # Applied as 1 + w: scores with a standard deviation of 2, so that what is attended to matters, as it does in
    # trained models. With 1, attention over random tokens is nearly their mean, and hardly notices what is missing.
    yield "self_attn.q_norm.weight", r.normal(d, std=0.1, mean=1.0)
    yield "self_attn.k_norm.weight", r.normal(d, std=0.1)
    yield "self_attn.o_proj.weight", r.linear(h, heads * d, gain=4.0)


def delta_net(r: Random, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    h, heads, taps = c["hidden_size"], c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    value = heads * c["linear_value_head_dim"]
    conv = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + value
    yield "linear_attn.in_proj_qkv.weight", r.linear(conv, h)
    yield "linear_attn.in_proj_z.weight", r.linear(value, h)
    yield "linear_attn.in_proj_b.weight", r.linear(heads, h, gain=1.5)
    yield "linear_attn.in_proj_a.weight", r.linear(heads, h, gain=1.5)
    yield "linear_attn.conv1d.weight", r.normal(conv, 1, taps, std=0.6)
    # float32 in checkpoints; transformers rounds to bf16 when it loads as bf16, so they are bf16 numbers.
    yield "linear_attn.A_log", r.uniform(heads, math.log(0.3), math.log(6.0)).float()
    yield "linear_attn.dt_bias", r.uniform(heads, -5.0, -1.0)
    yield "linear_attn.norm.weight", r.normal(c["linear_value_head_dim"], std=0.2, mean=1.0).float()
    yield "linear_attn.out_proj.weight", r.linear(h, value, gain=1.6)


def mlp(r: Random, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    h, width = c["hidden_size"], c.get("intermediate_size", c.get("shared_expert_intermediate_size"))
    at = "mlp."
    if "num_experts" in c:
        experts, inter, at = c["num_experts"], c["moe_intermediate_size"], "mlp.shared_expert."
        # Decided routers: an expert that bf16 lets in for another has a small weight, so that runs can be compared.
        yield "mlp.gate.weight", r.linear(experts, h, gain=6.0)
        yield "mlp.experts.gate_up_proj", r.linear(experts, 2 * inter, h)
        yield "mlp.experts.down_proj", r.linear(experts, h, inter, gain=2.0)
        yield "mlp.shared_expert_gate.weight", r.linear(1, h)
    yield at + "gate_proj.weight", r.linear(width, h)
    yield at + "up_proj.weight", r.linear(width, h)
    yield at + "down_proj.weight", r.linear(h, width, gain=2.0)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as e4m3 values and BF16 scales, one for each block of 128 x 128."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % 128, 0, -n % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)
    values = (blocks / scales.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:n, :k].contiguous(), scales


def meant(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What quantize() made of a weight, float32: bf16 cannot hold it."""
    wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


def quantized(
    weights: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a block-scaled checkpoint, and what they mean."""
    small, same = {}, {}
    for name, tensor in weights.items():
        if any(part in name for part in NEVER_FP8):
            small[name] = same[name] = tensor
            continue
        parts = (
            experts_apart(name, tensor) if ".experts." in name else [(name.removesuffix(".weight"), tensor)]
        )
        found = []
        for module, weight in parts:
            values, scales = quantize(weight)
            small[module + ".weight"], small[module + ".weight_scale_inv"] = values, scales
            found.append(meant(values, scales))
        same[name] = torch.stack(found).reshape(tensor.shape)
    return small, same


def experts_apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    at, kind = name.rsplit(".", 1)
    for expert, weight in enumerate(tensor):
        if kind == "down_proj":
            yield f"{at}.{expert}.down_proj", weight
        else:
            yield from zip(
                (f"{at}.{expert}.gate_proj", f"{at}.{expert}.up_proj"), weight.chunk(2), strict=True
            )


def save(weights: dict[str, torch.Tensor], config: dict[str, Any], out: Path) -> None:
    """Two shards and an index, as published checkpoints have."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    names = list(weights)
    where = {}
    for k, shard in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{k + 1:05d}-of-00002.safetensors"
        save_file({n: weights[n].cpu().contiguous() for n in shard}, out / file)
        where |= dict.fromkeys(shard, file)
    total = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def logprobs(model: Any, sequences: list[list[int]], device: str) -> list[torch.Tensor]:
    """Log-probabilities [FORCED, V] of the last FORCED positions of each sequence, on the host, float32."""
    found = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens], device=device)
            logits = model(ids, use_cache=False, logits_to_keep=FORCED).logits[0].float()
            found.append(torch.log_softmax(logits, -1).cpu())
    return found


def reference(
    config: dict[str, Any], weights: dict[str, torch.Tensor], sequences: list[list[int]], device: str
) -> dict[str, np.ndarray]:
    """The arrays of reference.npz for these weights."""
    runs = {}
    known = {name: value for name, value in config.items() if name != "architectures"}
    for dtype in (torch.bfloat16, torch.float32):
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known), dtype=dtype).eval()
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"transformers misses {missing} and does not know {unexpected}")
        model.tie_weights()
        runs[dtype] = logprobs(model, sequences, device)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    arrays: dict[str, np.ndarray] = {"count": np.array(len(sequences))}
    for n, tokens in enumerate(sequences):
        bf16, fp32 = runs[torch.bfloat16][n], runs[torch.float32][n]
        values, ids = bf16.topk(TOP, -1)
        arrays |= {
            f"s{n}.tokens": np.array(tokens, np.int32),
            f"s{n}.top_ids": ids.numpy().astype(np.int32),
            f"s{n}.bf16": values.numpy(),
            f"s{n}.fp32": fp32.gather(-1, ids).numpy(),
        }
    std = float(torch.stack([run[-1].std() for run in runs[torch.float32]]).mean())
    print(f"logits have a standard deviation of {std:.2f}")
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has: a multiple of 4")
    parser.add_argument("--fp8", action="store_true", help="quantise the checkpoint in blocks")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out longer prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()

    def note(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {what}", flush=True)

    config = config_of(args.shape, args.layers)
    weights = random_weights(config, args.device, args.seed)
    if args.fp8:
        small, weights = quantized(weights)
        scheme = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
        save(small, {**config, "quantization_config": scheme}, args.out)
        del small
    else:
        save(weights, config, args.out)
    note("checkpoint written")
    rng = np.random.default_rng(args.seed)
    lengths = [n for n in LENGTHS if n <= args.longest]
    limit = min(config["vocab_size"], 248000)
    sequences = [rng.integers(0, limit, n + FORCED).tolist() for n in lengths]
    np.savez(args.out / "reference.npz", **reference(config, weights, sequences, args.device))
    note("reference.npz written")


if __name__ == "__main__":
    main()
