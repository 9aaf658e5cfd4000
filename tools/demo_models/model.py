"""A family's torch model as trained: master weights, what a step computes with, and the loss."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import quantize
import torch
import torch.nn.functional as F
from families import Family
from layers import Weights, losses
from torch import Tensor

PROMPT_WEIGHT, MTP_WEIGHT = 0.1, 0.3
"""Of a prompt's tokens, and of the MTP head's loss."""
BIAS_RATE = 1e-3
"""How fast the bias of an expert follows its load."""


class Model:
    """`weights`: float32 masters by published name."""

    def __init__(self, family: Family, device: torch.device, seed: int) -> None:
        self.family, self.config = family, family.config
        self.code: ModuleType = importlib.import_module(f"torch_{family.name}")
        generator = torch.Generator().manual_seed(seed)
        self.weights: Weights = {
            name: self.code.initial(name, shape, generator).to(device).requires_grad_(self._trained(name))
            for name, shape in self.code.shapes(self.config).items()
        }
        self.fixed: Weights = {}
        if self.quantised:
            self._add_routing(device)

    @property
    def quantised(self) -> bool:
        """Whether weights are rounded to FP8 and FP4."""
        return "quantization_config" in self.config

    def _trained(self, name: str) -> bool:
        return ".indexer." not in name and not name.endswith("gate.bias")

    def _add_routing(self, device: torch.device) -> None:
        """Tables of hash layers, and what each expert of the others was given since the last step."""
        for name in [name for name in self.weights if name.endswith("ffn.gate.weight")]:
            at = name.removesuffix("weight")
            if at + "bias" in self.weights:
                self.fixed[at + "load"] = torch.zeros(self.config["n_routed_experts"], device=device)
            else:
                self.fixed[at + "tid2eid"] = self.code.hash_table(self.config).to(device)

    def parts(self) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """Matrices for Muon, the other trained tensors, and the share of the learning rate of each of these: small
        matrices that sum over many features take smaller steps."""
        matrices, others, shares = [], [], []
        for name, w in self.weights.items():
            if not w.requires_grad:
                continue
            if w.dim() == 2 and min(w.shape) >= 64 and name not in (self.code.EMBED, self.code.HEAD):
                matrices.append(w)
            else:
                others.append(w)
                small = w.dim() == 2 and min(w.shape) < 64 and not name.endswith("ape")
                shares.append(0.2 if small else 1.0)
        return matrices, others, shares

    def running(self, dtype: torch.dtype = torch.bfloat16) -> Weights:
        """What a step computes with: the values of the checkpoint, with gradients to the masters; matrices in dtype."""
        found = dict(self.fixed)
        groups: dict[tuple[str, int], list[str]] = {}
        for name, w in self.weights.items():
            kind = self.format_of(name)
            if kind in ("fp8", "fp4"):
                groups.setdefault((kind, w.shape[1]), []).append(name)
            elif kind == "f32":
                found[name] = w
            else:
                found[name] = w.bfloat16().to(dtype) if w.dim() > 1 else w.bfloat16().float()
        for (kind, _), names in groups.items():
            parts = [self.weights[name] for name in names]
            if kind == "fp8" and any(part.shape[0] % quantize.BLOCK for part in parts):
                raise ValueError(
                    f"{names}: rows are no multiple of {quantize.BLOCK}, so blocks would mix matrices"
                )
            tall = torch.cat(parts)
            rounded = (quantize.fp8_rounded if kind == "fp8" else quantize.fp4_rounded)(tall.detach())
            split = quantize.through(rounded, tall).to(dtype).split([len(part) for part in parts])
            found |= dict(zip(names, split, strict=True))
        found["lookup"] = self.weights[self.code.EMBED].bfloat16().float()
        return found

    def format_of(self, name: str) -> str:
        """How the checkpoint stores a tensor: bf16, f32, fp8 or fp4."""
        if self.quantised:
            kind: str = self.code.format_of(name)
            return kind
        return "f32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "bf16"

    def loss(self, w: Weights, ids: Tensor, prompt: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over the rows ids [B, T + 1]: the weighted loss with MTP, the plain loss of the answers, the weights."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        place = torch.arange(1, ids.shape[1], device=ids.device)[None]
        answer = ((place >= prompt[:, None]) & (place < total[:, None])).float()
        weight = answer + PROMPT_WEIGHT * (place < prompt[:, None]).float()
        states, deep = self.code.hidden_states(w, self.config, inputs)
        each = losses(F.linear(states, w[self.code.HEAD]), targets)
        objective = (each * weight).sum()
        if self.code.MTP:
            again = self.code.mtp_states(w, self.config, deep, targets)
            second = losses(F.linear(again[:, :-1], w[self.code.HEAD]), targets[:, 1:])
            objective = objective + MTP_WEIGHT * (second * weight[:, 1:]).sum()
        return objective, torch.stack([(each * answer).sum(), answer.sum()]).detach(), weight.sum()

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias of every router towards experts with too little to do."""
        for name, load in self.fixed.items():
            if name.endswith("gate.load"):
                bias = self.weights[name.removesuffix("load") + "bias"]
                bias.add_(BIAS_RATE * torch.sign(load.mean() - load))
                load.zero_()

    @torch.no_grad()
    def logits(self, w: Weights, ids: Tensor, at: Tensor) -> Tensor:
        """Next-token logits float32 [B, V] after position at [B] of ids [B, T]."""
        states, _ = self.code.hidden_states(w, self.config, ids)
        last = states[torch.arange(len(ids), device=ids.device), at]
        return F.linear(last, w[self.code.HEAD]).float()

    @torch.no_grad()
    def drafts(self, w: Weights, ids: Tensor) -> Tensor:
        """The MTP head's best guess of token t + 2 at each t, [B, T - 1], for ids [B, T]."""
        _, deep = self.code.hidden_states(w, self.config, ids)
        following = F.pad(ids[:, 1:], (0, 1))
        states = self.code.mtp_states(w, self.config, deep, following)
        return F.linear(states[:, :-1], w[self.code.HEAD]).argmax(-1)


def describe(config: dict[str, Any]) -> str:
    """A line for the log."""
    return ", ".join(f"{key} {config[key]}" for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
