"""A DeepSeek-V4 checkpoint of published shape with seeded random weights, cut to its first five layers, and what
references say of it.

    python scripts/deepseek_v4_reference.py --shape flash --out DIR [--device cuda]

Needs torch and transformers, which no distribution of this project does: it makes test data. DIR gets the checkpoint in
the published format (packed FP8 and FP4 weights, a shard a layer, 19 GB for V4-Flash) and reference.npz, which
openinfer.recipes.engine.gate reads: token sequences, and at the last positions of each

    s<n>.top_ids, s<n>.bf16             transformers' 64 most likely tokens in bf16, and their log-probabilities
    s<n>.fp32, s<n>.actq                these in float32 (deepseek_v4_forward.py), without and with the published
                                        rounding of activations
    s<n>.route_margin, .index_margin    by how much experts and entries were chosen in float32, where it was least
    s<n>.layer_inputs, .layer_outputs   each layer alone, with rounding: bits of bf16, and float32 of the last positions
    s<n>.layer_own                      how far a run that stores bf16 is from that, as a part of what the layer adds

The five layers have every kind of attention and both kinds of routing. In bf16 the model takes 65 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepseek_v4_forward import Forward, meant, power_of_two
from safetensors.torch import save_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4IndexerScorer,
    eager_attention_forward,
)

from openinfer.recipes.deepseek_v4.published import config_json

SHAPES: dict[str, dict[str, int]] = {
    "flash": {},
    "tiny": {
        "vocab_size": 1024, "hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 128, "o_groups": 2,
        "o_lora_rank": 64, "index_n_heads": 16, "index_topk": 32, "moe_intermediate_size": 128, "n_routed_experts": 8,
        "num_experts_per_tok": 3,
    },
}  # fmt: skip
LENGTHS = (1, 5, 64, 129, 300, 1000, 3000, 8192)
"""Prompt lengths; FORCED more tokens follow each. The indexer leaves entries out from 2,048 tokens on."""
FORCED, TOP, LOGIT_STD = 24, 64, 2.5
BY_LAYER, LAST = (300, 3000), 256
"""Prompts whose layers are run one by one, and positions at their end that are compared."""
QUERIES = 512
"""Queries whose scores transformers' attention and indexer have at a time."""
KEPT_FLOAT32 = re.compile(r"attn_hc|ffn_hc|hc_head|sinks|position_bias|e_score_correction_bias")


def config_of(shape: str) -> dict[str, Any]:
    """config.json of V4-Flash's first five layers, or of smaller ones."""
    raw = config_json("Flash", layers=5) | {"architectures": ["DeepseekV4ForCausalLM"], "dtype": "bfloat16"}
    return raw | SHAPES[shape]


class Random:
    """Seeded tensors by published name, in the published dtypes. `gain`: the outputs' size for inputs of size 1."""

    def __init__(self, device: str, seed: int) -> None:
        self.generator, self.device = torch.Generator(device).manual_seed(seed), device
        self.weights: dict[str, torch.Tensor] = {}

    def draw(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return mean + torch.randn(*shape, generator=self.generator, device=self.device) * std

    def float32(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.weights[name] = self.draw(*shape, std=std, mean=mean)

    def bf16(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.weights[name] = self.draw(*shape, std=std, mean=mean).to(torch.bfloat16)

    def linear(self, name: str, *shape: int, gain: float = 1.0) -> None:
        self.bf16(name + ".weight", *shape, std=gain / math.sqrt(shape[-1]))

    def norm(self, name: str, size: int, mean: float = 1.0) -> None:
        self.bf16(name + ".weight", size, std=0.1, mean=mean)

    def float8(self, name: str, n: int, k: int, gain: float = 1.0) -> None:
        """e4m3 numbers and a power of two for each block of 128 x 128."""
        weight = self.draw(n, k, std=gain / math.sqrt(k))
        padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128))
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = power_of_two(blocks.abs().amax((1, 3)) / 448)
        values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        self.weights[name + ".weight"] = values.flatten(2, 3).flatten(0, 1)[:n, :k].contiguous()
        self.weights[name + ".scale"] = scale.to(torch.float8_e8m0fnu)

    def fp4(self, name: str, n: int, k: int, gain: float = 1.0) -> None:
        """Codes of all kinds alike, whose values have a mean square of 8.56, with scales around what makes `gain`."""
        codes = torch.randint(
            0, 256, (n, k // 2), generator=self.generator, device=self.device, dtype=torch.uint8
        )
        middle = 127 + math.log2(gain / math.sqrt(8.56 * k))
        drawn = torch.rand(n, k // 32, generator=self.generator, device=self.device) * 2 - 1
        scale = (middle + drawn).round().to(torch.uint8)
        self.weights[name + ".weight"] = codes.view(torch.int8)
        self.weights[name + ".scale"] = scale.view(torch.float8_e8m0fnu)


def random_weights(c: Mapping[str, Any], device: str, seed: int) -> dict[str, torch.Tensor]:
    """The whole inventory; the head is scaled for logits of standard deviation 2.5."""
    r, h = Random(device, seed), c["hidden_size"]
    r.bf16("embed.weight", c["vocab_size"], h, std=1.0)
    for n, ratio in enumerate(c["compress_ratios"]):
        # Later layers add less, as in trained models: with equal shares bf16's errors pile up over the layers.
        layer(r, c, f"layers.{n}.", ratio, hashed=n < c["num_hash_layers"], share=1 / (1 + n / 2))
    streams = c["hc_mult"]
    r.float32("hc_head_fn", streams, streams * h, std=1 / math.sqrt(streams * h))
    r.float32("hc_head_base", streams, std=0.5)
    r.float32("hc_head_scale", 1, std=0.1, mean=1.0)
    r.norm("norm", h)
    r.linear("head", c["vocab_size"], h, gain=LOGIT_STD)
    return r.weights


def layer(r: Random, c: Mapping[str, Any], at: str, ratio: int, *, hashed: bool, share: float) -> None:
    h, streams = c["hidden_size"], c["hc_mult"]
    for part in ("attn", "ffn"):
        numbers = streams * (streams + 2)
        r.float32(f"{at}hc_{part}_fn", numbers, streams * h, std=1 / math.sqrt(streams * h))
        r.float32(f"{at}hc_{part}_base", numbers, std=0.5)
        r.float32(f"{at}hc_{part}_scale", 3, std=0.1, mean=1.0)
        r.norm(f"{at}{part}_norm", h)
    attention(r, c, at + "attn.", ratio, share)
    at += "ffn."
    experts, inter = c["n_routed_experts"], c["moe_intermediate_size"]
    # Decided routers: an expert that bf16 lets in for another has a small weight, so that runs can be compared.
    r.linear(at + "gate", experts, h, gain=6.0)
    if hashed:
        drawn = torch.rand(c["vocab_size"], experts, generator=r.generator, device=r.device)
        r.weights[at + "gate.tid2eid"] = drawn.topk(c["num_experts_per_tok"], -1).indices
    else:
        r.float32(at + "gate.bias", experts, std=0.3)
    kinds = [(r.fp4, f"{at}experts.{e}.") for e in range(experts)] + [(r.float8, at + "shared_experts.")]
    for make, name in kinds:
        make(name + "w1", inter, h)
        make(name + "w2", h, inter, gain=1.5 * share)
        make(name + "w3", inter, h)


def attention(r: Random, c: Mapping[str, Any], at: str, ratio: int, share: float) -> None:
    h, heads, dim, low = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
    groups, rank = c["o_groups"], c["o_lora_rank"]
    r.float32(at + "attn_sink", heads, std=1.0)
    r.float8(at + "wq_a", low, h)
    r.norm(at + "q_norm", low)
    r.float8(at + "wq_b", heads * dim, low)
    r.float8(at + "wkv", dim, h)
    r.norm(at + "kv_norm", dim)
    r.float8(at + "wo_a", groups * rank, heads * dim // groups, gain=1.5)
    r.float8(at + "wo_b", h, groups * rank, gain=1.5 * share)
    compressors = [(at + "compressor.", dim)] if ratio else []
    if ratio == 4:
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        r.float8(at + "indexer.wq_b", index_heads * index_dim, low)
        r.linear(at + "indexer.weights_proj", index_heads, h)
        compressors.append((at + "indexer.compressor.", index_dim))
    for name, size in compressors:
        columns = 2 * size if ratio == 4 else size
        r.float32(name + "ape", ratio, columns, std=0.7)
        r.linear(name + "wkv", columns, h)
        r.linear(name + "wgate", columns, h, gain=1.5)
        r.norm(name + "norm", size)


def save(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], out: Path) -> None:
    """A shard a layer, one of the rest, and an index, as published checkpoints have."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    shards: dict[str, list[str]] = {}
    for name in weights:
        shards.setdefault(".".join(name.split(".")[:2]) if name.startswith("layers.") else "", []).append(
            name
        )
    where = {}
    for k, names in enumerate(shards.values()):
        file = f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: weights[n].cpu().contiguous() for n in names}, out / file)
        where |= dict.fromkeys(names, file)
    total = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


# transformers

RENAMED = (
    (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"), (r"^layers\.", "model.layers."), (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn_sink$", ".sinks"), (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.wq_b\.", ".attn.compressor.indexer.q_b_proj."), (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."), (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."), (r"\.ape$", ".position_bias"),
    (r"\.wgate\.", ".gate_proj."), (r"\.wkv\.", ".kv_proj."), (r"\.w(q|o)_(a|b)\.", r".\1_\2_proj."),
    (r"\.q_norm\.", ".q_a_norm."), (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"(shared_experts)\.w1\.", r"\1.gate_proj."), (r"(shared_experts)\.w2\.", r"\1.down_proj."),
    (r"(shared_experts)\.w3\.", r"\1.up_proj."),
)  # fmt: skip


def renamed(name: str) -> str:
    """A published name as transformers has it; experts' excepted, which it stacks."""
    for pattern, to in RENAMED:
        name = re.sub(pattern, to, name)
    return name


def attention_in_parts(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention, some queries after the others: the scores of all at once do not fit."""
    parts = []
    for start in range(0, query.shape[2], QUERIES):
        part = slice(start, start + QUERIES)
        seen = mask[:, :, part] if mask is not None else None
        parts.append(eager_attention_forward(module, query[:, :, part], key, value, seen, **rest)[0])
    return torch.cat(parts, 1), None


_score = DeepseekV4IndexerScorer.forward


def score_in_parts(
    module: torch.nn.Module, q: torch.Tensor, entries: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """The same for the indexer's scores."""
    parts = [slice(start, start + QUERIES) for start in range(0, q.shape[1], QUERIES)]
    return torch.cat([_score(module, q[:, part], entries, x[:, part]) for part in parts], 1)


def transformers_model(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], device: str, dtype: torch.dtype
) -> Any:
    """The model of these weights, expanded to `dtype`, but what transformers keeps in float32."""
    DeepseekV4IndexerScorer.forward = score_in_parts
    AttentionInterface.register("in_parts", attention_in_parts)
    AttentionMaskInterface.register("in_parts", eager_mask)
    known = {
        k: v for k, v in config.items() if k not in ("architectures", "quantization_config", "expert_dtype")
    }
    with torch.device(device):
        read = AutoConfig.for_model(**known)
        model = AutoModelForCausalLM.from_config(read, dtype=dtype, attn_implementation="in_parts").eval()
    for name, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for leaf, tensor in own.items():
                if tensor is not None and KEPT_FLOAT32.search(f"{name}.{leaf}"):
                    tensor.data = tensor.data.float()
    missing = dict(model.state_dict())
    with torch.no_grad():
        for name in weights:
            if name.endswith(".scale"):
                continue
            found = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.w([123])\.weight", name)
            if found is None:
                target = missing.pop(renamed(name))
            else:
                stacked = model.model.layers[int(found[1])].mlp.experts
                target = stacked.down_proj if found[3] == "2" else stacked.gate_up_proj
                target = target[int(found[2])]
                if found[3] != "2":
                    target = target.chunk(2)[found[3] == "3"]
            target.copy_(meant(weights, name, device, target.dtype))
    left = [name for name in missing if ".experts." not in name]
    if left:
        raise ValueError(f"transformers has tensors that the checkpoint has not: {left}")
    return model


def run_transformers(model: Any, tokens: list[int], device: str) -> torch.Tensor:
    """Log-probabilities [FORCED, V] of the last FORCED positions of a sequence, on the host, float32."""
    with torch.no_grad():
        ids = torch.tensor([tokens], device=device)
        logits = model(ids, use_cache=False, logits_to_keep=FORCED).logits[0].float()
    return torch.log_softmax(logits, -1).cpu()


def write_reference(
    out: Path, config: Mapping[str, Any], weights: dict[str, torch.Tensor], sequences: list[list[int]], device: str,
    note: Callable[[str], None],
) -> None:  # fmt: skip
    """reference.npz for these weights, which are let go. The file is written anew after each sequence."""
    runs, margins, alone = {}, [], {}
    for name, quantized in (("fp32", False), ("actq", True)):
        forward = Forward(config, weights, device, quantized)
        with torch.no_grad():
            logits = forward.logits(sequences, FORCED)
        runs[name] = [torch.log_softmax(part, -1) for part in logits]
        note(f"{name} run")
        if not quantized:
            print(f"logits have a standard deviation of {float(torch.cat(logits).std(-1).mean()):.2f}")
            margins = list(last_margins(forward, sequences))
        else:
            alone = {
                n: one_by_one(forward, s) for n, s in enumerate(sequences) if len(s) - FORCED in BY_LAYER
            }
            note("layers one by one")
        del forward
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    model = transformers_model(config, weights, device, torch.bfloat16)
    weights.clear()
    note("transformers has its weights")
    arrays: dict[str, np.ndarray] = {"mixture": np.array(True)}
    for n, tokens in enumerate(sequences):
        values, ids = run_transformers(model, tokens, device).topk(TOP, -1)
        arrays |= {
            "count": np.array(n + 1),
            f"s{n}.tokens": np.array(tokens, np.int32),
            f"s{n}.top_ids": ids.numpy().astype(np.int32),
            f"s{n}.bf16": values.numpy(),
            f"s{n}.route_margin": margins[n][0],
            f"s{n}.index_margin": margins[n][1],
        }
        arrays |= {f"s{n}.{name}": runs[name][n].gather(-1, ids).numpy() for name in ("fp32", "actq")}
        arrays |= {f"s{n}.layer_{name}": array for name, array in alone.pop(n, {}).items()}
        np.savez(out / "reference.npz", **arrays)
        note(f"reference.npz has the sequence of {len(tokens)} tokens")


def one_by_one(forward: Forward, tokens: list[int]) -> dict[str, np.ndarray]:
    """What reference.npz has of the layers of one sequence."""
    inputs, outputs, own = [], [], []
    with torch.no_grad():
        for given, made, stored in forward.layers(tokens, min(LAST, len(tokens))):
            added = (made - given[-len(made) :].float()).flatten(1).norm(dim=1)
            own.append(((stored - made).flatten(1).norm(dim=1) / added).cpu().numpy())
            inputs.append(given.view(torch.uint16).cpu().numpy())
            outputs.append(made.cpu().numpy())
    return {"inputs": np.stack(inputs), "outputs": np.stack(outputs), "own": np.stack(own)}


def last_margins(forward: Forward, sequences: list[list[int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    end = 0
    for tokens in sequences:
        end += len(tokens)
        part = slice(end - FORCED, end)
        yield forward.route_margins[part].cpu().numpy(), forward.index_margins[part].cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="flash")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out longer prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()

    def note(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {what}", flush=True)

    config = config_of(args.shape)
    weights = random_weights(config, args.device, args.seed)
    note("weights drawn")
    save(weights, config, args.out)
    note("checkpoint written")
    rng = np.random.default_rng(args.seed)
    sequences = [
        rng.integers(2, config["vocab_size"] * 63 // 64, n + FORCED).tolist()
        for n in LENGTHS
        if n <= args.longest
    ]
    write_reference(args.out, config, weights, sequences, args.device, note)


if __name__ == "__main__":
    main()
