"""How DeepSeek-V4 spreads over several GPUs: the figures of docs/deepseek_v4_parallel.md, from config and op costs.

    python scripts/deepseek_v4_parallel.py [--size Flash]

One rank's part is laid out on the null device and one step of it is traced, as an engine's start does it. No GPU, no
weights. Collectives are not in the trace: they are added as COLLECTIVE_S and the bytes over LINK.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from openinfer.cli.segments import Outline
from openinfer.kernels import GPUS, H200, Cost, NullPack
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.deepseek_v4.config import Config
from openinfer.recipes.deepseek_v4.published import SIZES, config_json
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.limits import OUTSIDE_BYTES

FIGURES = GPUS[H200.gpu]
COLLECTIVE_S, LINK = 12e-6, 300e9
"""Assumed, not measured: the latency of an all-reduce over NVLink in a graph, and the bytes a second that each rank
sends in one."""
MEMORY = FIGURES.memory_bytes * 0.9
"""Bytes of a GPU that an engine takes."""
RANKS = (2, 4, 8)
STEPS = ((1, 4096, 0), (8, 4096, 0), (32, 4096, 0), (128, 4096, 0), (0, 0, 4096))
"""Rows that decode, their context, and tokens of a prompt."""


class Traced(NamedTuple):
    """A step of one rank: the costs of its ops by name in the order of calls, and kernels."""

    costs: list[tuple[str, Cost]]
    kernels: int


def traced(outline: Outline, step: tuple[int, int, int]) -> Traced:
    """The step's forward segment."""
    rows, context, prompt = step
    ((forward, _),) = outline.prefill(prompt) if prompt else outline.decode(rows, context)
    pack = NullPack(H200)
    forward.run(pack)
    costs = [(call.op.name, call.cost(forward.workload)) for call in pack.calls]
    return Traced(costs, sum(len(call.commands) for call in pack.calls))


def share(whole: Traced, rank: Traced, ranks: int) -> list[Cost]:
    """Costs of a rank. Its experts' op knows only how many a token is sent to, not how many of them are elsewhere: so
    they are an even part of what they cost one GPU."""
    both = zip(whole.costs, rank.costs, strict=True)
    return [
        Cost(all_of.bytes // ranks, all_of.flops // ranks) if name == "experts" else own
        for (_, all_of), (name, own) in both
    ]


def collectives(config: Config, rows: int, tokens: int, ranks: int) -> float:
    """Seconds: two all-reduces of [tokens, D] in bf16 a layer, and the logits of the rows, float32."""
    part = 2 * (ranks - 1) / ranks
    a_layer = COLLECTIVE_S + part * tokens * config.hidden_size * 2 / LINK
    logits = COLLECTIVE_S + part / 2 * rows * config.vocab_size * 4 / LINK
    return 2 * config.num_layers * a_layer + logits


def figures(size: str) -> Iterator[str]:
    """Lines of the two tables, in Markdown."""
    whole_config = Config.parse(config_json(size))
    options = RECIPE.options(max_num_seqs=128, max_num_batched_tokens=4096, max_model_len=131072)
    source = Source(config_json(size))
    models = {ranks: Outline(RECIPE, source, options, H200, ranks=ranks) for ranks in (1, *RANKS)}
    yield "| GPUs | weights a rank | of it the same on all | left for the cache | tokens of entries in half of it |"
    yield "| --- | --- | --- | --- | --- |"
    bytes_of = {ranks: outline.memory["weights"] for ranks, outline in models.items()}
    # With n ranks a rank has same + shared / n.
    same = (4 * bytes_of[4] - 2 * bytes_of[2]) / 2
    entry = whole_config.entry_page_bytes(2) / 128
    for ranks in RANKS:
        memory = models[ranks].memory
        other = sum(memory[name] for name in ("activations", "batch state", "rotary tables"))
        left = MEMORY - OUTSIDE_BYTES - other - bytes_of[ranks]
        tokens = f"{left / 2 / entry / 1e6:.1f} million" if left > 0 else "it does not fit"
        sizes_of = " | ".join(f"{n / 1e9:.1f} GB" for n in (bytes_of[ranks], same, max(left, 0)))
        yield f"| {ranks} | {sizes_of} | {tokens} |"
    yield ""
    yield "| step | GPUs | MB read and written | floor | kernels | collectives | expected |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    speed = FIGURES.fitted
    for step in STEPS:
        rows, context, prompt = step
        name = f"prompt of {prompt}" if prompt else f"decode {rows} x {context}"
        whole = traced(models[1], step)
        for ranks in RANKS:
            own = traced(models[ranks], step)
            costs = share(whole, own, ranks)
            floor = sum(cost.floor_s(FIGURES.peak.bytes_per_s, FIGURES.peak.flops_per_s) for cost in costs)
            between = collectives(whole_config, rows or 1, rows + prompt, ranks)
            ops = sum(cost.floor_s(speed.bytes_per_s, speed.flops_per_s) for cost in costs)
            expected = ops + own.kernels * speed.kernel_s + between
            moved = sum(cost.bytes for cost in costs)
            times = [f"{s * 1e3:.1f} ms" for s in (floor, between, expected)]
            cells = (name, str(ranks), f"{moved / 1e6:,.0f}", times[0], f"{own.kernels:,}", *times[1:])
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES], default="Flash")
    print("\n".join(figures(parser.parse_args().size)))
