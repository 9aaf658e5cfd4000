"""Code that the references of all families share: seeded tensors, shards, transformers' runs, and reference.npz."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

FORCED = 24
"""Tokens after each prompt, whose log-probabilities are kept."""
TOP = 64
"""Most likely tokens that are kept at each of these positions."""
LOGIT_STD = 2.5
"""Standard deviation of the logits that the head's weights are scaled for."""


class Random:
    """Seeded tensors. Projections keep the variance of what they read, times `gain` squared."""

    def __init__(self, device: str, seed: int) -> None:
        self.generator, self.device = torch.Generator(device).manual_seed(seed), device

    def draw(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).mul_(std).add_(mean)

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return self.draw(*shape, std=std, mean=mean).to(torch.bfloat16)

    def uniform(self, size: int, low: float, high: float) -> torch.Tensor:
        drawn = torch.rand(size, generator=self.generator, device=self.device)
        return (low + drawn * (high - low)).to(torch.bfloat16)

    def linear(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(*shape, std=gain / math.sqrt(shape[-1]))


def halves(names: Iterable[str]) -> list[list[str]]:
    """The tensors in two shards."""
    every = list(names)
    return [every[: len(every) // 2], every[len(every) // 2 :]]


def save(
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    out: Path,
    shards: Sequence[Sequence[str]],
) -> None:
    """The shards and their index, as published checkpoints have them."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    where = {}
    for k, names in enumerate(shards):
        file = f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: weights[n].cpu().contiguous() for n in names}, out / file)
        where |= dict.fromkeys(names, file)
    total = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


class Run(NamedTuple):
    """The results at the last FORCED positions of a sequence, on the host.

    logprobs: float32 [FORCED, V]. experts: the experts that each mixture chose, ascending, int16 [FORCED, mixtures,
    chosen]; None for a model without mixtures."""

    logprobs: torch.Tensor
    experts: np.ndarray | None

    @classmethod
    def of(cls, logits: torch.Tensor, chosen: Sequence[torch.Tensor]) -> Run:
        """A run from logits and the ids [tokens, chosen] of each mixture, both of the whole sequence or of its end."""
        ids = [layer[-FORCED:].sort(-1).values.to(torch.int16).cpu().numpy() for layer in chosen]
        last = torch.log_softmax(logits[-FORCED:].float(), -1).cpu()
        return cls(last, np.stack(ids, 1) if ids else None)


def forward(model: Any, tokens: Sequence[int], device: str) -> Run:
    """transformers' run of one sequence."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(lambda *call: chosen.append(call[2][-1])) for router in routers]
    with torch.no_grad():
        ids = torch.tensor([tokens], device=device)
        logits = model(ids, use_cache=False, logits_to_keep=FORCED).logits[0]
    for hook in hooks:
        hook.remove()
    return Run.of(logits, chosen)


def widen(model: torch.nn.Module) -> None:
    """Compute in float32, with the weights of a layer's part in float32 only while it runs."""
    (layers,) = (m for n, m in model.named_modules() if n.endswith(".layers"))
    inside = {id(one) for one in layers.parameters()}
    for one in model.parameters():
        if id(one) not in inside:
            one.data = one.data.float()
    for part in (part for layer in layers for part in layer.children()):
        kept = [(one, one.data) for one in (*part.parameters(), *part.buffers())]

        def before(*_: Any, kept: Any = kept) -> None:
            for one, data in kept:
                one.data = data.float()

        def after(*_: Any, kept: Any = kept) -> None:
            for one, data in kept:
                one.data = data

        part.register_forward_pre_hook(before)
        part.register_forward_hook(after)


def runs(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], sequences: Sequence[Sequence[int]], device: str,
    note: Callable[[str], None],
) -> dict[str, list[Run]]:  # fmt: skip
    """transformers' runs in bf16 and in float32, of weights whose published names are its own."""
    known = {
        name: value for name, value in config.items() if name not in ("architectures", "quantization_config")
    }
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        # Without memory of its own: the weights of a model may be most of what there is.
        with torch.device(device), init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known), dtype=dtype).eval()
        held = dict(weights)
        if dtype == torch.bfloat16:
            own = {n: t.dtype for n, t in (*model.named_parameters(), *model.named_buffers())}
            held = {n: w.to(own.get(n)) for n, w in weights.items()}
        missing, unexpected = model.load_state_dict(held, strict=False, assign=True)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"transformers misses {missing} and does not know {unexpected}")
        model.tie_weights()
        if dtype == torch.float32:
            widen(model)
        found[name] = [forward(model, tokens, device) for tokens in sequences]
        del model, held
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        note(f"{name} run")
    deviation = torch.cat([run.logprobs.std(-1) for run in found["fp32"]]).mean()
    note(f"logits have a standard deviation of {float(deviation):.2f}")
    return found


def arrays(sequences: Sequence[Sequence[int]], found: Mapping[str, Sequence[Run]]) -> dict[str, np.ndarray]:
    """The arrays of reference.npz for the sequences: each run's log-probabilities of the tokens that the run "bf16"
    finds most likely, and its experts."""
    kept: dict[str, np.ndarray] = {"count": np.array(len(sequences))}
    for n, tokens in enumerate(sequences):
        ids = found["bf16"][n].logprobs.topk(TOP, -1).indices
        kept |= {f"s{n}.tokens": np.array(tokens, np.int32), f"s{n}.top_ids": ids.numpy().astype(np.int32)}
        kept |= {f"s{n}.{name}": of[n].logprobs.gather(-1, ids).numpy() for name, of in found.items()}
        kept |= {
            f"s{n}.experts_{name}": of[n].experts for name, of in found.items() if of[n].experts is not None
        }
    return kept


def reference(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], sequences: Sequence[Sequence[int]], device: str,
    note: Callable[[str], None],
) -> dict[str, np.ndarray]:  # fmt: skip
    """The arrays of reference.npz for these weights, by transformers alone."""
    return arrays(sequences, runs(config, weights, sequences, device, note))
