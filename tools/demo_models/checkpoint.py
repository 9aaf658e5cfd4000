"""Write a trained model in its family's published checkpoint format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import quantize
import torch
from model import Model
from safetensors.torch import save_file
from torch import Tensor


def save(model: Model, folder: Path) -> None:
    """model.safetensors, config.json and generation_config.json. (The tokenizer's files are there before.)"""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write(folder / "generation_config.json", model.family.generation)
    _write(folder / "config.json", model.config)


def tensors(model: Model) -> dict[str, Tensor]:
    """Every tensor by its published name and in its published dtype."""
    found: dict[str, Tensor] = {}
    for name, weight in model.weights.items():
        w = weight.detach().float().cpu()
        kind = model.format_of(name)
        if kind == "bf16":
            found[name] = w.bfloat16()
        elif kind == "f32":
            found[name] = w
        else:
            codes, scales = quantize.fp8(w) if kind == "fp8" else quantize.fp4_packed(w)
            found[name] = codes
            found[name.removesuffix("weight") + "scale"] = scales.to(torch.float8_e8m0fnu)
    found |= {name: table.cpu() for name, table in model.fixed.items() if name.endswith("tid2eid")}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def load(model: Model, folder: Path) -> None:
    """Read a checkpoint back into the masters."""
    from safetensors.torch import load_file

    stored = load_file(str(folder / "model.safetensors"))
    with torch.no_grad():
        for name, weight in model.weights.items():
            kind, value = model.format_of(name), stored[name]
            if kind == "fp8":
                scales = stored[name.removesuffix("weight") + "scale"].float()
                weight.copy_(value.float() * quantize.spread(scales, value.shape))
            elif kind == "fp4":
                weight.copy_(
                    quantize.fp4_unpacked(value, stored[name.removesuffix("weight") + "scale"].float())
                )
            else:
                weight.copy_(value.float())


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
