"""DeepSeek-V4: the first five layers of a published shape, in packed FP8 and FP4 weights, a shard a layer. Shapes
named -0731 have a DSpark drafter of three layers too.

V4-Flash's five layers are 19 GB on disk and 65 GB in bf16; they have every kind of attention and both kinds of routing.
Beside transformers' run in bf16 and ours in float32 (deepseek_v4_forward.py) there is a run in float32 that rounds
activations as the published code does: s<n>.actq. For some sequences each layer is run alone, with that rounding:

    s<n>.layer_inputs, .layer_outputs   bits of bf16, and float32 of the last positions
    s<n>.layer_own                      how far a run that stores bf16 is from that, as a part of what the layer adds
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import common
import numpy as np
import torch
from deepseek_v4_forward import Forward, meant, power_of_two
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
SHAPES |= {f"{name}-0731": sizes for name, sizes in SHAPES.items()}
LENGTHS = (1, 5, 64, 129, 300, 1000, 3000, 8192)
"""Prompt lengths; FORCED more tokens follow each. The indexer leaves entries out from 2,048 tokens on."""
BY_LAYER, LAST = (300, 3000), 256
"""Prompts whose layers are run one by one, and positions at their end that are compared."""
QUERIES = 512
"""Queries whose scores transformers' attention and indexer have at a time."""
KEPT_FLOAT32 = re.compile(r"attn_hc|ffn_hc|hc_head|sinks|position_bias|e_score_correction_bias")


def config_of(shape: str, layers: int | None) -> dict[str, Any]:
    """config.json of V4-Flash's first layers, or of smaller ones."""
    drafting = shape.endswith("-0731")
    raw = config_json("Flash-0731" if drafting else "Flash", layers=layers or 5, drafting=drafting)
    raw |= {"architectures": ["DeepseekV4ForCausalLM"], "dtype": "bfloat16", **SHAPES[shape]}
    return raw | ({"dspark_noise_token_id": raw["vocab_size"] - 1} if drafting else {})


class Random(common.Random):
    """Seeded tensors by published name, in the published dtypes. `gain`: the outputs' size for inputs of size 1."""

    def __init__(self, device: str, seed: int) -> None:
        super().__init__(device, seed)
        self.weights: dict[str, torch.Tensor] = {}

    def float32(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.weights[name] = self.draw(*shape, std=std, mean=mean)

    def bf16(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.weights[name] = self.normal(*shape, std=std, mean=mean)

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        self.weights[name + ".weight"] = self.linear(*shape, gain=gain)

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
    for n, ratio in enumerate(c["compress_ratios"][: c["num_hidden_layers"]]):
        # Later layers add less, as in trained models: with equal shares bf16's errors pile up over the layers.
        layer(r, c, f"layers.{n}.", ratio, hashed=n < c["num_hash_layers"], share=1 / (1 + n / 2))
    streams = c["hc_mult"]
    r.float32("hc_head_fn", streams, streams * h, std=1 / math.sqrt(streams * h))
    r.float32("hc_head_base", streams, std=0.5)
    r.float32("hc_head_scale", 1, std=0.1, mean=1.0)
    r.norm("norm", h)
    r.matrix("head", c["vocab_size"], h, gain=common.LOGIT_STD)
    if "dspark_block_size" in c:
        drafter(r, c)
    return r.weights


def drafter(r: Random, c: Mapping[str, Any]) -> None:
    """The layers of a DSpark drafter and its heads."""
    h, streams, stages = c["hidden_size"], c["hc_mult"], len(c["compress_ratios"]) - c["num_hidden_layers"]
    for n in range(stages):
        layer(r, c, f"mtp.{n}.", 0, hashed=False, share=1 / (1 + n / 2))
    r.float8("mtp.0.main_proj", h, h * len(c["dspark_target_layer_ids"]))
    r.norm("mtp.0.main_norm", h)
    last = f"mtp.{stages - 1}."
    r.norm(last + "norm", h)
    r.float32(last + "hc_head_fn", streams, streams * h, std=1 / math.sqrt(streams * h))
    r.float32(last + "hc_head_base", streams, std=0.5)
    r.float32(last + "hc_head_scale", 1, std=0.1, mean=1.0)
    rank = c["dspark_markov_rank"]
    r.bf16(last + "markov_head.markov_w1.weight", c["vocab_size"], rank, std=1.0)
    r.bf16(last + "markov_head.markov_w2.weight", c["vocab_size"], rank, std=1 / math.sqrt(rank))
    r.bf16(last + "confidence_head.proj.weight", 1, h + rank, std=1 / math.sqrt(h))


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
    r.matrix(at + "gate", experts, h, gain=6.0)
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
        r.matrix(at + "indexer.weights_proj", index_heads, h)
        compressors.append((at + "indexer.compressor.", index_dim))
    for name, size in compressors:
        columns = 2 * size if ratio == 4 else size
        r.float32(name + "ape", ratio, columns, std=0.7)
        r.matrix(name + "wkv", columns, h)
        r.matrix(name + "wgate", columns, h, gain=1.5)
        r.norm(name + "norm", size)


def shards(names: Iterable[str]) -> list[list[str]]:
    """A shard a layer, and one of the rest."""
    found: dict[str, list[str]] = {}
    for name in names:
        part = ".".join(name.split(".")[:2]) if name.startswith(("layers.", "mtp.")) else ""
        found.setdefault(part, []).append(name)
    return list(found.values())


def token_range(config: Mapping[str, Any]) -> tuple[int, int]:
    return 2, config["vocab_size"] * 63 // 64


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
            if name.endswith(".scale") or name.startswith("mtp."):
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


def reference(
    config: Mapping[str, Any], weights: dict[str, torch.Tensor], sequences: Sequence[list[int]], device: str,
    note: Callable[[str], None],
) -> dict[str, np.ndarray]:  # fmt: skip
    """The arrays of reference.npz for these weights, which are let go."""
    found: dict[str, list[common.Run]] = {}
    alone: dict[str, np.ndarray] = {}
    for name, quantized in (("fp32", False), ("actq", True)):
        forward = Forward(config, weights, device, quantized)
        with torch.no_grad():
            found[name] = [common.Run.of(*run) for run in forward.runs(sequences, common.FORCED)]
        note(f"{name} run")
        if quantized:
            for n, tokens in enumerate(sequences):
                if len(tokens) - common.FORCED in BY_LAYER:
                    alone |= {f"s{n}.layer_{part}": x for part, x in one_by_one(forward, tokens).items()}
            note("layers one by one")
        del forward
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    model = transformers_model(config, weights, device, torch.bfloat16)
    weights.clear()
    note("transformers has its weights")
    found["bf16"] = [common.forward(model, tokens, device) for tokens in sequences]
    note("bf16 run")
    return common.arrays(sequences, found) | alone


def one_by_one(forward: Forward, tokens: list[int]) -> dict[str, np.ndarray]:
    """The arrays of reference.npz for the layers of one sequence."""
    inputs, outputs, own = [], [], []
    with torch.no_grad():
        for given, made, stored in forward.layers(tokens, min(LAST, len(tokens))):
            added = (made - given[-len(made) :].float()).flatten(1).norm(dim=1)
            own.append(((stored - made).flatten(1).norm(dim=1) / added).cpu().numpy())
            inputs.append(given.view(torch.uint16).cpu().numpy())
            outputs.append(made.cpu().numpy())
    return {"inputs": np.stack(inputs), "outputs": np.stack(outputs), "own": np.stack(own)}
