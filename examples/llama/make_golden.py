"""Make golden checkpoints of the tests: `python make_golden.py [NAME ...]`, with torch, transformers and tokenizers.

The weights are random, in bf16. golden.npz gets the results of transformers in float32: for each prompt the logits of
its last positions and 32 greedy tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)  # fmt: skip

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 96, "vocab_size": 384, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
MODELS = {
    "llama-tiny": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    ),
    "mistral-tiny": (
        MistralForCausalLM,
        MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=24),
    ),
    "qwen2-tiny": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **{
                **SIZES,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "intermediate_size": 48,
                "vocab_size": 272,
                "rms_norm_eps": 1e-6,
            },
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            use_sliding_window=False,
            sliding_window=16,
        ),
    ),
}
LENGTHS, NEW = (1, 7, 33, 129, 300), 32
LAST = {"llama-tiny": 8, "mistral-tiny": 8, "qwen2-tiny": 3}
"""Positions of a prompt whose logits are kept."""


def main() -> None:
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        if name not in (sys.argv[1:] or MODELS):
            continue
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        model = kind(config).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                scale = 2.5 if "embed" in key or "lm_head" in key else 1.5
                noise = torch.randn_like(weight)
                if weight.dim() == 1:  # norms, and biases as large as what they are added to
                    value = 1 + 0.1 * noise if "norm" in key else noise
                else:
                    value = scale * noise / weight.shape[1] ** 0.5
                weight.copy_(value.to(torch.bfloat16))
        folder = Path(__file__).parent / "golden" / name
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}))
        tokenizer(folder, config.vocab_size)
        np.savez(folder / "golden.npz", **numbers(model, LAST[name]))


def numbers(model: torch.nn.Module, last: int) -> dict[str, np.ndarray]:
    """The arrays ids{n}, logits{n} float32 [last, V] and greedy{n} of each prompt n. Prompts whose greedy tokens win
    narrowly are drawn again, because rounding may decide them."""
    found, generator = {}, torch.Generator().manual_seed(7)
    for n, length in enumerate(LENGTHS):
        new, margin = [], 0.0
        while margin < 1e-3:
            prompt = torch.randint(2, model.config.vocab_size, (1, length), generator=generator)
            new, margin = greedy(model, prompt)
        with torch.no_grad():
            found[f"logits{n}"] = model(prompt).logits[0, -last:].float().numpy()
        found[f"ids{n}"] = prompt[0].to(torch.int32).numpy()
        found[f"greedy{n}"] = np.array(new, np.int32)
    return found


def greedy(model: torch.nn.Module, ids: torch.Tensor) -> tuple[list[int], float]:
    """The next tokens, and the least distance of one of them to the second best."""
    margin, length = float("inf"), ids.shape[1]
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        margin = min(margin, first - second)
        ids = torch.cat([ids, logits.argmax().reshape(1, 1)], dim=1)
    return ids[0, length:].tolist(), margin


def tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer: two special tokens, 256 bytes, and words to fill the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *letters, *(f"<{n}>" for n in range(size - 2 - len(letters)))]
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant:"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main()
