"""python -m openinfer.scheduler.sim: compare policies on a workload."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

from ..errors import SchedulerError
from ..policies import POLICIES, imported, make_policy
from ..pool import Pool
from .cost import LinearCost
from .pool import SimPool
from .report import Report, figure_class, plot
from .simulate import simulate
from .workloads import Range, Request, bursts, chats, poisson, read_trace

WORKLOADS = {"poisson": poisson, "bursts": bursts, "chats": chats}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m openinfer.scheduler.sim",
        description="Serve a workload in virtual time under one or several policies, and compare what clients see.",
    )
    add = parser.add_argument
    add("--policy", nargs="+", default=["fcfs"], metavar="SPEC",
        help=f"{', '.join(POLICIES)}, or MODULE:FUNCTION; options behind commas: fcfs,tpot_s=0.02")  # fmt: skip
    add("--workload", default="poisson", help="poisson, bursts, chats, or a trace (.jsonl); default: poisson")
    add("--num-requests", type=int, default=1000, help="default: %(default)s")
    add("--rate", type=float, default=16.0, help="requests a second; default: %(default)s")
    add("--input", type=_range, metavar="N[-M]", help="prompt tokens (chats: of a turn), drawn evenly")
    add("--output", type=_range, metavar="N[-M]", help="output tokens")
    add("--speed", type=float, default=1.0, help="speed of a trace: 2 is twice as fast; default: %(default)s")
    add("--seed", type=int, default=0)
    add("--cost", metavar="FILE", help="measured steps, JSON, to fit the step time to; default: an example's")
    add("--pool", metavar="MODULE:FUNCTION", help="makes a pool of (blocks, block size); default: SimPool")
    add("--num-blocks", type=int, default=20_000, help="KV blocks of the pool; default: %(default)s")
    add("--block-size", type=int, default=16, help="tokens of a block; default: %(default)s")
    add("--max-num-seqs", type=int, default=256, help="default: %(default)s")
    add("--max-num-batched-tokens", type=int, default=2048, help="default: %(default)s")
    add("--max-num-queued-reqs", type=int, default=1024, help="default: %(default)s")
    add("--max-model-len", type=int, default=32_768, help="default: %(default)s")
    add("--ttft-ms", type=float, help="TTFT objective, for goodput")
    add("--tpot-ms", type=float, help="TPOT objective, for goodput (a policy's own is its option tpot_s)")
    add("--json", action="store_true", help="print the whole report instead of a table")
    add("--plot", metavar="PNG", help="draw TTFT, TPOT and total times; needs openinfer-scheduler[plot]")
    return parser


def _range(text: str) -> Range:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _workload(args: argparse.Namespace) -> list[Request]:
    make = WORKLOADS.get(args.workload)
    if make is None:
        return read_trace(args.workload, speed=args.speed)
    lengths = {"prompt_tokens": args.input, "output_tokens": args.output}
    given = {name: value for name, value in lengths.items() if value is not None}
    return make(args.num_requests, args.rate, **given, seed=args.seed)


def _simulate(spec: str, workload: list[Request], args: argparse.Namespace) -> Report:
    seconds = {"ttft_s": args.ttft_ms and args.ttft_ms / 1e3, "tpot_s": args.tpot_ms and args.tpot_ms / 1e3}
    make_pool: Callable[[int, int], Pool] = SimPool if args.pool is None else imported(args.pool, "pool")
    return simulate(
        workload,
        make_policy(spec, max_batched_tokens=args.max_num_batched_tokens),
        make_pool(args.num_blocks, args.block_size),
        LinearCost.load(args.cost) if args.cost else LinearCost(),
        max_rows=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_queued=args.max_num_queued_reqs,
        **seconds,
    )


def _table(reports: dict[str, Report]) -> str:
    first = "policy (times in ms)"
    width = max(len(first), *(len(spec) for spec in reports))
    head = ("TTFT p50/p99", "TPOT p50/p99", "ITL p99", "req/s", "tok/s", "goodput", "hits", "preempted")
    lines = [f"{first:{width}}  " + "  ".join(head)]
    for spec, r in reports.items():
        ttft = f"{r.ttft.p50 * 1e3:.0f}/{r.ttft.p99 * 1e3:.0f}"
        tpot = f"{r.tpot.p50 * 1e3:.1f}/{r.tpot.p99 * 1e3:.1f}"
        lines.append(
            f"{spec:{width}}  {ttft:>12}  {tpot:>12}  {r.itl.p99 * 1e3:7.1f}  {r.requests_per_s:5.1f}  "
            f"{r.output_tokens_per_s:5.0f}  {r.goodput:7.2f}  {r.hit_rate:4.0%}  {r.preemptions:9}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.plot:
            figure_class()  # what is missing is said before the work
        workload = _workload(args)
        start = time.perf_counter()
        reports = {spec: _simulate(spec, workload, args) for spec in args.policy}
        elapsed = time.perf_counter() - start
        if args.plot:
            plot(reports, args.plot)
    except (SchedulerError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({spec: report.as_dict() for spec, report in reports.items()}))
        return 0
    print(_table(reports))
    tokens = sum(report.prompt_tokens + report.output_tokens for report in reports.values())
    virtual = sum(report.seconds for report in reports.values())
    print(f"{virtual:.0f} s of serving, {tokens / 1e6:.2f} million tokens, simulated in {elapsed:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
