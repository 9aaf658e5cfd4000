"""`openinfer explain MODEL`: a step op by op, with the floor of each, and the use of the memory. Needs no GPU.

The floor of a call is the larger of its least memory traffic over the bandwidth and its FLOPs over the rate. With the
ledger of `openinfer bench ops --json` the measured times stand beside it, where the very same shape was measured.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from openinfer.cli import recipe_flags
from openinfer.cli.explain import ledger
from openinfer.cli.explain.ledger import Machine, machine, machine_flags
from openinfer.cli.explain.segments import SERVED, Outline, Segment, Steps
from openinfer.cli.plan import tiers
from openinfer.cli.recipe_flags import Asked
from openinfer.kernels import GPUS, H200, Call, NullPack, Parts, Target
from openinfer.kernels.ranks.exchange import described
from openinfer.recipes.engine import SetupError
from openinfer.tensor import format_bytes


@dataclass(slots=True)
class Line:
    """All calls of one op and weight shape in a step: in sum bytes, FLOPs, kernels and microseconds, and bytes to other
    ranks. `us` is NaN as soon as one of the calls was not measured."""

    name: str
    calls: int = 0
    kernels: int = 0
    bytes: int = 0
    flops: int = 0
    floor_us: float = 0.0
    us: float = 0.0
    link: int = 0


def main(argv: list[str]) -> int:
    """Print; returns 0, 1 for what cannot be explained, 2 for wrong arguments."""
    return recipe_flags.run_command(argv, "explain", __doc__, _flags, _explain, named=True)


def _flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--decode", default="1,1024", metavar="ROWS,CONTEXT",
        help="a decode step of ROWS sequences of CONTEXT tokens each; default: %(default)s")  # fmt: skip
    what.add_argument("--prefill", type=int, metavar="TOKENS", help="the steps of one prompt instead")
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="the part of one of N GPUs; default: --tensor-parallel-size")
    add("--ledger", type=Path, metavar="FILE", help="the file of `openinfer bench ops --json FILE`")
    add("--plot", type=Path, metavar="FILE.png", help="draw the step into it; needs openinfer-cli[plot]")
    memory_flag(parser)
    machine_flags(parser)
    tiers.flags(parser)


def memory_flag(parser: argparse.ArgumentParser) -> None:
    memory = GPUS[H200.gpu].memory_bytes / 1e9
    text = "memory of the GPU; default: %(default)s (H200)"
    parser.add_argument("--gpu-memory", type=float, default=memory, metavar="GB", help=text)


def _explain(args: argparse.Namespace, asked: Asked) -> int:
    if args.prefill is not None and args.prefill < 1:
        raise recipe_flags.BadFlags(f"--prefill {args.prefill}: a prompt has at least one token")
    ranks = asked.options.tensor_parallel_size if args.ranks is None else args.ranks
    if ranks < 1:
        raise recipe_flags.BadFlags(f"--ranks {ranks}: a model is on at least one GPU")
    if args.plot:
        recipe_flags.figure_type()  # what is missing is said before the work
    memory = args.gpu_memory * 1e9
    outline = Outline(asked.recipe, asked.source(), asked.options, SERVED, ranks=ranks, memory_bytes=memory)
    measured = ledger.microseconds(args.ledger) if args.ledger else {}
    if args.prefill:
        title, steps = f"prefill of {args.prefill} tokens", outline.prefill(args.prefill)
    else:
        rows, context = _pair(args.decode)
        title, steps = f"decode of {rows} rows, context {context}", outline.decode(rows, context)
    lines = trace(steps, outline.target, machine(args), measured)
    print(f"{title}: " + "; then ".join(" and ".join(s.name for s in step) for step in steps))
    print(table(lines, bool(measured)))
    print(f"  predicted on an {H200.gpu}: {predicted(steps, outline.target, ranks)}")
    print(f"  {outline.kernels}")
    for how, count in exchanges(steps, outline.target).items():
        print(f"  between ranks: {count} x {how}")
    print(memory_plan(outline, memory, args.gpu_memory_utilization))
    for line in tiers.describe(asked.options, outline.groups, outline.parts, tiers.speeds(args)):
        print(f"  tier: {line}")
    if args.plot:
        _plot(lines, title, args.plot)
    return 0


def _pair(text: str) -> tuple[int, int]:
    numbers = [int(part) for part in text.split(",") if part.isdigit()]
    if len(numbers) != 2 or min(numbers) < 1:
        raise recipe_flags.BadFlags(f"--decode {text}: it is ROWS,CONTEXT, both at least 1")
    return numbers[0], numbers[1]


def _calls(steps: Steps, target: Target) -> Iterator[tuple[Segment, list[Call]]]:
    for segment in (segment for step in steps for segment in step):
        pack = NullPack(target)
        yield segment, pack.traced(partial(segment.run, pack))


def trace(steps: Steps, target: Target, limits: Machine, measured: dict[str, float]) -> list[Line]:
    """The lines of a list of steps, each a list of segments, in the order in which ops are first called."""
    lines: dict[str, Line] = {}
    for segment, calls in _calls(steps, target):
        for call in calls:
            cost = call.cost(segment.workload)
            weight = getattr(call.args, "weight", None)
            name = call.op.name + ("" if weight is None else f" {weight.shape[0]}x{weight.shape[-1]}")
            line = lines.setdefault(name, Line(name))
            line.calls += 1
            line.kernels += len(call.commands)
            line.bytes += cost.bytes
            line.flops += cost.flops
            line.link += cost.link
            line.floor_us += limits.floor_us(cost)
            line.us += measured.get(ledger.ledger_key(call.op, call.args, segment.workload), math.nan)
    return list(lines.values())


def predicted(steps: Steps, target: Target, ranks: int) -> str:
    """The time of these steps at the speeds that were fitted to the target's GPU, and what it goes to."""
    found = Counter[str]()
    for segment, calls in _calls(steps, target):
        parts = Parts.of(calls, segment.workload, GPUS[target.gpu], ranks)
        found.update({name: 1e3 * seconds for name, seconds in parts.names.items()})
    shares = ", ".join(f"{name} {ms:.2f}" for name, ms in found.most_common() if ms)
    return f"{found.total():.2f} ms: {shares}"


def exchanges(steps: Steps, target: Target) -> Counter[str]:
    """The ways in which ranks exchange arrays in these steps, and how often each is taken."""
    commands = (command for _, calls in _calls(steps, target) for call in calls for command in call.commands)
    return Counter(how for command in commands if (how := described(command)))


def table(lines: list[Line], with_measured: bool) -> str:
    """The lines as text, with their sum. Measured times have a sum where every line has one. Link bytes have a column
    where a line has any."""
    head = f"{'op':<28}{'calls':>6}{'kernels':>8}{'MB':>10}{'GFLOP':>9}{'floor us':>9}"
    links = any(line.link for line in lines)
    head += f"{'link MB':>9}" if links else ""
    rows = [head + (f"{'measured us':>12}{'of floor':>9}" if with_measured else "")]
    for line in [*lines, total(lines)]:
        text = (
            f"{line.name:<28}{line.calls:>6}{line.kernels:>8}{line.bytes / 1e6:>10.2f}"
            f"{line.flops / 1e9:>9.2f}{line.floor_us:>9.1f}"
        )
        text += f"{line.link / 1e6:>9.3f}" if links else ""
        if with_measured:
            known = not math.isnan(line.us)
            text += f"{line.us:>12.1f}{line.floor_us / line.us:>9.0%}" if known else f"{'-':>12}{'-':>9}"
        rows.append(text)
    return "\n".join(rows)


def total(lines: list[Line]) -> Line:
    names = ("calls", "kernels", "bytes", "flops", "floor_us", "us", "link")
    return Line("sum", *(sum(getattr(line, name) for line in lines) for name in names))


def memory_plan(outline: Outline, gpu_bytes: float, utilization: float) -> str:
    """The memory plan as text: the fixed parts, and the cache in the rest."""
    rows = [f"memory of {format_bytes(gpu_bytes)}, of which {utilization:.0%} are used:"]
    rows += [f"  {name:<26} {format_bytes(size):>8}" for name, size in outline.memory.items()]
    try:
        pool = outline.cache(int(gpu_bytes * utilization) - outline.fixed_bytes)
    except SetupError as error:
        return "\n".join([*rows, f"  {error}"])
    rows += [
        f"  {f'cache: {group.name}':<26} {format_bytes(group.num_blocks * group.block_bytes):>8}: "
        f"{group.num_blocks - 1} blocks of {group.block_size} tokens, {format_bytes(group.block_bytes)} each"
        for group in pool.groups
    ]
    rows.append(f"  the cache of keys and values is {outline.cache_form.dtype.name}")
    rows.append(f"  the longest sequence that fits alone has {min(pool.capacity_tokens, 1 << 40)} tokens")
    return "\n".join(rows)


def _plot(lines: list[Line], title: str, path: Path) -> None:
    figure = recipe_flags.figure_type()(figsize=(9, 0.4 * len(lines) + 1.6), layout="constrained")
    axes = figure.subplots()
    places = range(len(lines), 0, -1)
    measured = [(at, line.us) for at, line in zip(places, lines, strict=True) if not math.isnan(line.us)]
    if measured:
        axes.barh(*zip(*measured, strict=True), height=0.8, color="#c6cbd4", label="measured")
    axes.barh(list(places), [line.floor_us for line in lines], height=0.45, color="#2f6f9f", label="floor")
    axes.set_yticks(list(places), [f"{line.calls} x {line.name}" for line in lines])
    axes.set_xlabel("microseconds a step")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)
