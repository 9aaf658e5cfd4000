"""`openinfer bench step MODEL_DIR`: decode and prefill steps and offline throughput.

Steps are timed twice: through the engine on the host's clock, and on the device by events. Token ids are random and the
prefix cache is off.
"""

import argparse
import json
import logging
from pathlib import Path

from openinfer.cli import recipe_flags
from openinfer.cli.bench import gaps, points
from openinfer.cli.bench.record import add_record_arguments, progress, record, write
from openinfer.cli.recipe_flags import Asked, without_prefix_cache
from openinfer.frontend.errors import FlagError


def main(argv: list[str]) -> int:
    """Measure; returns 0, 1 for what cannot be measured, 2 for wrong arguments."""
    return recipe_flags.run_command(argv, "bench step", __doc__, _flags, _measure)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--points", nargs="+", metavar="POINT",
        help="decode:ROWS,CONTEXT prefill:TOKENS mixed:ROWS,CONTEXT,TOKENS offline:REQUESTS,IN,OUT; "
        "default: those of the published targets")  # fmt: skip
    add("--repeats", type=int, default=20, help="timed steps a point; default: %(default)s")
    add("--records", type=Path, metavar="FILE",
        help="write the steps' times with their workloads, for the scheduler's simulator; "
        "this adds default points")  # fmt: skip
    add("--gaps", action="store_true",
        help="instead: the kernels of decode points (default: decode:1,1024) and the gaps between them, through CUPTI; "
        "exit code 1 if one is longer than 5 us")  # fmt: skip
    add_record_arguments(parser)


def _measure(args: argparse.Namespace, asked: Asked) -> int:
    chosen = args.points or [*points.POINTS, *(points.RECORD_POINTS if args.records else ())]
    for point in chosen:
        points.parse_points(point)
    if args.repeats < 1:
        raise recipe_flags.BadFlags(f"--repeats {args.repeats}: it must be at least 1")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if args.gaps:
        return gaps.measure_gaps(args, asked)
    engine = without_prefix_cache(asked)
    results = []
    progress(f"{len(chosen)} points: {' '.join(chosen)}")
    try:
        for result in points.measure_points(engine, chosen, repeats=args.repeats):
            progress(_line(result))
            results.append(result)
        compiles = engine.stats().compiles_after_ready
    finally:
        engine.close()
        records = [r for result in results for r in result.pop("records")]
        if args.json:
            write(args.json, record("step", args, results, model=engine.info.model))
        if args.records:
            args.records.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
            progress(f"wrote {args.records}")
    print("\n".join(map(_line, results)))
    if compiles:
        raise FlagError(f"{compiles} kernels were compiled while measuring: the figures do not count")
    return 0


def _line(result: dict[str, object]) -> str:
    names = {
        "wall_ms": "ms through the engine",
        "device_ms": "ms on the device",
        "output_tokens_per_s": "tokens/s",
    }
    found = [f"{result[name]:10.3f} {unit}" for name, unit in names.items() if name in result]
    return f"{result['point']:>22} " + "".join(found)
