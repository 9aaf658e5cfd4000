"""Write a Qwen3 checkpoint of a published shape with seeded random weights, and what transformers says of it.

    python scripts/qwen3_reference.py --shape 4b --out DIR [--layers N] [--device cuda] [--long]

Needs torch and transformers, which no distribution of this project does: it makes test data. DIR gets the checkpoint in
the published format (two shards and an index) and reference.npz, which openinfer.recipes.engine.gate reads: token
sequences, and at the last positions of each the reference's 64 most likely tokens with their log-probabilities in bf16
and in float32. With --long, DIR has the checkpoint already and gets long.npz, of prompts up to the model's maximum.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import sdpa_attention

SHAPES = {  # hidden, layers, heads, intermediate, tied
    "tiny": (256, 4, 4, 384, True),
    "0.6b": (1024, 28, 16, 3072, True),
    "1.7b": (2048, 28, 16, 6144, True),
    "4b": (2560, 36, 32, 9728, True),
    "8b": (4096, 36, 32, 12288, False),
}
LENGTHS = (1, 5, 64, 129, 300, 1000, 2048, 4200)
"""Prompt lengths; FORCED more tokens follow each."""
LONG_LENGTHS = (16384, 40960 - 24)
FORCED = 24
TOP = 64
LOGIT_STD = 2.5


def config_of(shape: str, layers: int | None) -> Qwen3Config:
    hidden, num_layers, heads, intermediate, tied = SHAPES[shape]
    tiny = shape == "tiny"
    return Qwen3Config(
        vocab_size=1024 if tiny else 151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or num_layers,
        num_attention_heads=heads,
        num_key_value_heads=2 if tiny else 8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attention_bias=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=2 if tiny else 151645,
        torch_dtype="bfloat16",
    )


def random_weights(config: Qwen3Config, device: str, seed: int) -> dict[str, torch.Tensor]:
    """bf16 tensors by published name. Projections keep the variance; norm weights vary around 1; the head is scaled for
    logits of standard deviation 2.5."""
    generator = torch.Generator(device).manual_seed(seed)
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).to(torch.bfloat16)

    def linear(out: int, inp: int, gain: float = 1.0) -> torch.Tensor:
        return normal(out, inp, std=gain / math.sqrt(inp))

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator, device=device)).to(torch.bfloat16)

    head_std = LOGIT_STD / math.sqrt(h)
    weights = {"model.embed_tokens.weight": normal(config.vocab_size, h, std=head_std)}
    for n in range(config.num_hidden_layers):
        at = f"model.layers.{n}."
        weights |= {
            at + "input_layernorm.weight": norm(h),
            at + "self_attn.q_proj.weight": linear(q, h),
            at + "self_attn.k_proj.weight": linear(kv, h),
            at + "self_attn.v_proj.weight": linear(kv, h),
            at + "self_attn.q_norm.weight": norm(d),
            at + "self_attn.k_norm.weight": norm(d),
            at + "self_attn.o_proj.weight": linear(h, q, 2.0),
            at + "post_attention_layernorm.weight": norm(h),
            at + "mlp.gate_proj.weight": linear(i, h),
            at + "mlp.up_proj.weight": linear(i, h),
            at + "mlp.down_proj.weight": linear(h, i, 2.0),
        }
    weights["model.norm.weight"] = norm(h)
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = normal(config.vocab_size, h, std=head_std)
    return weights


def save(weights: dict[str, torch.Tensor], config: Qwen3Config, out: Path) -> None:
    """Two shards and an index, as published checkpoints have."""
    raw = json.loads(config.to_json_string(use_diff=False))
    raw |= {"rope_theta": 1000000.0, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (out / "config.json").write_text(json.dumps(raw, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}))
    names = list(weights)
    shards = (names[: len(names) // 2], names[len(names) // 2 :])
    where = {}
    for k, shard in enumerate(shards):
        file = f"model-{k + 1:05d}-of-00002.safetensors"
        save_file({n: weights[n].cpu().contiguous() for n in shard}, out / file)
        where |= dict.fromkeys(shard, file)
    total = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def logprobs(model: Qwen3ForCausalLM, sequences: list[list[int]], device: str) -> list[torch.Tensor]:
    """Log-probabilities [FORCED, V] of the last FORCED positions of each sequence, on the host, float32."""
    found = []
    # With heads repeated there is a float32 kernel that does not write a 40,960 x 40,960 matrix of scores.
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens], device=device)
            logits = model(ids, use_cache=False, logits_to_keep=FORCED).logits[0].float()
            found.append(torch.log_softmax(logits, -1).cpu())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--long", action="store_true", help="long prompts on the checkpoint that is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    def note(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {what}", flush=True)

    config = config_of(args.shape, args.layers)
    if not args.long:
        save(random_weights(config, args.device, args.seed), config, args.out)
        note("checkpoint written")
    rng = np.random.default_rng(args.seed)
    limit = min(config.vocab_size, 151000)
    lengths = LONG_LENGTHS if args.long else LENGTHS
    sequences = [rng.integers(0, limit, n + FORCED).tolist() for n in lengths]
    runs = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = Qwen3ForCausalLM.from_pretrained(args.out, dtype=dtype).to(args.device).eval()
        runs[dtype] = logprobs(model, sequences, args.device)
        del model
        if args.device == "cuda":
            torch.cuda.empty_cache()
        note(f"{dtype} reference")
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
    name = "long.npz" if args.long else "reference.npz"
    np.savez(args.out / name, **arrays)
    std = float(torch.stack([r[-1].std() for r in runs[torch.float32]]).mean())
    note(f"{name} written; logits have a standard deviation of {std:.2f}")


if __name__ == "__main__":
    main()
