"""Compare a checkpoint's float32 logits: the training model, transformers, and the numpy engine where there is one.

python tools/demo_models/verify.py FAMILY DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import checkpoint
import torch
import torch_deepseek_v4
from corpus import examples
from families import FAMILIES
from model import Model
from transformers import AutoConfig, AutoModelForCausalLM


def reference(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits, float32."""
    options = {}
    if "quantization_config" in AutoConfig.from_pretrained(folder).to_dict():
        from transformers import FineGrainedFP8Config

        options["quantization_config"] = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    with torch.no_grad():
        logits: torch.Tensor = model.float().eval()(ids, use_cache=False).logits.float()
    return logits


def main() -> None:
    """Print the largest difference for a few chats."""
    torch.set_flush_denormal(True)
    family, folder = FAMILIES[sys.argv[1]], Path(sys.argv[2])
    model = Model(family, torch.device("cpu"), 0)
    checkpoint.load(model, folder)
    torch_deepseek_v4.ROUNDING["activations"] = False
    chats = [ids for ids, _ in examples(family.name, folder, 99, 40) if len(ids) > 32][:6]
    for tokens in chats:
        ids = torch.tensor(tokens.astype("int64"))[None]
        padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % 128))
        w = model.running(torch.float32)
        with torch.no_grad():
            states, _ = model.code.hidden_states(w, model.config, padded)
            ours = torch.nn.functional.linear(states, w[model.code.HEAD]).float()[:, : ids.shape[1]]
        theirs = reference(folder, ids)
        print(
            f"{ids.shape[1]} tokens: max |dlogit| {(ours - theirs).abs().max():.2e}, std {theirs.std():.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
