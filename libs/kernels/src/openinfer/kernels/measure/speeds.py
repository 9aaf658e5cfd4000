"""GPUS: what is known of the speed of a GPU, of all its kernels together and of single ops."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

FOLDER = Path(__file__).parent / "speeds_of_ops"
"""Lines by GPU; `benchmarks/predicted.py NAME --write` writes them: `ops` of single ops, `products` of products with
packed weights and of attention's sublayer, `mixtures` of mixtures and of attention to latents."""
PRODUCT = "product, "
"""Begins the name of the lines of dense products with weights of a packed format; the format's short name ends it."""


class Speed(NamedTuple):
    """Bytes a second of a GPU's memory, FLOPs a second of its matrix units in bf16, and seconds that a kernel takes
    besides."""

    bytes_per_s: float
    flops_per_s: float
    kernel_s: float = 0.0


Lines = tuple[tuple[float, Speed], ...]
"""Speeds of one op by `Call.tokens`, ascending. Their `kernel_s` is the time of a call, not of each kernel."""


class LinkSpeed(NamedTuple):
    """Bytes a second that a GPU sends to the others in a collective, and the seconds of a collective of few bytes."""

    bytes_per_s: float
    call_s: float = 0.0


class Figures(NamedTuple):
    """The figures of a GPU, each by where it comes from.

    `memory_bytes`: what a process can take. `peak`: the vendor's. `measured`: what one kernel reached that did nothing
    but copy, or multiply. `fitted`: the line through measured steps of recipes, which is what their kernels reach.
    `link_bytes_per_s`: the vendor's, to all other GPUs, one way. `links`: what collectives reached, by the number of
    GPUs. `ops`: lines of single ops by name, from the recorded times of their calls; they count before `fitted`.
    `host_s`: seconds of the host's work that each step waits for.
    """

    memory_bytes: float
    peak: Speed
    measured: Speed
    fitted: Speed
    link_bytes_per_s: float
    links: Mapping[int, LinkSpeed] = MappingProxyType({})
    ops: Mapping[str, Lines] = MappingProxyType({})
    host_s: float = 0.0

    def speed(self, op: str, tokens: float, kernels: int) -> Speed:
        """The speed of a call of an op, or of a kind of it (`Call.kind`), which may have lines of its own: as an op, or
        as all products of a packed format (PRODUCT).

        `kernel_s` is the time of the call besides."""
        name, _, kind = op.partition(", ")
        lines = self.ops.get(op) or self.ops.get(PRODUCT + kind) or self.ops.get(name)
        if lines is None:
            return self.fitted._replace(kernel_s=kernels * self.fitted.kernel_s)
        at = bisect_left(lines, tokens, key=lambda line: line[0])
        (below, first), (above, last) = lines[max(0, at - 1)], lines[min(at, len(lines) - 1)]
        share = log(tokens / below) / log(above / below) if below < tokens < above else float(tokens >= above)
        return Speed(*(one ** (1 - share) * other**share for one, other in zip(first, last, strict=True)))

    def at(self, fitted: Speed) -> "Figures":
        """The figures where all ops are faster or slower as `fitted` is than this `fitted`."""
        ratios = [new / old for new, old in zip(fitted, self.fitted, strict=True)]
        ops = {
            name: tuple(
                (tokens, Speed(*(x * r for x, r in zip(speed, ratios, strict=True))))
                for tokens, speed in lines
            )
            for name, lines in self.ops.items()
        }
        return self._replace(fitted=fitted, ops=MappingProxyType(ops))

    def link(self, ranks: int) -> LinkSpeed:
        """The link among `ranks` GPUs, at the vendor's speed where none was measured."""
        return self.links.get(ranks, LinkSpeed(self.link_bytes_per_s))


def load_lines(text: str) -> Mapping[str, Lines]:
    """The lines of ops that `dump_lines` wrote. Raises ValueError, TypeError for another text."""
    data = json.loads(text).items()
    found = {op: tuple((tokens, Speed(*speed)) for tokens, *speed in lines) for op, lines in data}
    return MappingProxyType(found)


def dump_lines(lines: Mapping[str, Lines]) -> str:
    """Lines as JSON: tokens, bytes a second, FLOPs a second and seconds of a call, a line each."""
    ops = (
        f'"{op}": [\n'
        + ",\n".join(f" [{tokens:g}, {', '.join(f'{x:.3g}' for x in speed)}]" for tokens, speed in lines[op])
        + "]"
        for op in sorted(lines)
    )
    return "{\n" + ",\n".join(ops) + "\n}\n"


GPUS = {
    "NVIDIA H200": Figures(
        memory_bytes=150.1e9,
        peak=Speed(4.8e12, 989e12),
        measured=Speed(4.59e12, 780e12),
        fitted=Speed(4.06e12, 600e12, 4.26e-6),
        link_bytes_per_s=450e9,
        links=MappingProxyType(
            {2: LinkSpeed(190e9, 3.4e-6), 4: LinkSpeed(270e9, 3.4e-6), 8: LinkSpeed(306e9, 21e-6)}
        ),
        ops=load_lines((FOLDER / "nvidia_h200.json").read_text()),
    )
}
"""Figures by the GPU's name. `fitted` of the H200: `python benchmarks/predicted.py speeds`, over the newest
recorded decode and prompt steps of Qwen3-4B, Qwen3-8B and Qwen3.5-4B. `links`: of two and four, benchmarks/ranks.py's
pushes of 8 KB and NCCL's sums of 16 or 32 MB; of eight, the sums of benchmarks/deepseek_rank.py (ALL_REDUCE_US)."""
