"""`openinfer tune MODEL_DIR`: measure which kernels are fastest for a model's linear layers on this GPU.

With `-tp N` the layers are those of a rank, and the ways in which N GPUs add up their parts are measured too.

The results are kept after every measurement. So a run that was stopped goes on where it was, and engines started later
use them. `--out` writes a table elsewhere: the package's own tables (kernels/store/gpu_tables) are made that way.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from openinfer.cli import recipe_flags
from openinfer.cli.bench.record import add_record_arguments, progress, record, write
from openinfer.cli.explain.ledger import recorded_calls
from openinfer.cli.explain.segments import Outline
from openinfer.cli.recipe_flags import Asked
from openinfer.cli.tune import speed
from openinfer.kernels import H200
from openinfer.kernels.measure import tuner
from openinfer.kernels.measure.tuner import DeviceMeter, Measured, ProductShape, entry
from openinfer.kernels.store import tables
from openinfer.tensor import ProgressBar, float32

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LINEAR = ("norm_linear", "linear_add", "gate_up_silu")
"""The ops that look up a kernel in the tables."""


def main(argv: list[str]) -> int:
    """Measure; returns 0, 1 for what cannot be measured, 2 for wrong arguments."""
    return recipe_flags.run_command(argv, "tune", __doc__, _flags, _tune, named=True)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", metavar="N", default=list(TOKENS),
        help="token counts of steps to measure; a count between two takes the larger one's kernels; "
        "default: %(default)s")  # fmt: skip
    add("--budget", type=float, metavar="SECONDS", default=math.inf, help="stop after it; run again to go on")
    add("--again", action="store_true", help="measure again what was measured before")
    add("--out", type=Path, metavar="FILE",
        help=f"the table to write; default: the GPU's in {tables.user_tables()}, which engines read")  # fmt: skip
    add("--from-trace", type=Path, nargs="+", metavar="FILE",
        help="instead: fit the speeds of predictions to the steps of these files, of an engine's --trace or of `bench "
        "step --json`; needs no GPU. --out: the file for `openinfer plan --speeds`")  # fmt: skip
    add("--gpu", default="H200", metavar="NAME",
        help="with --from-trace: the machine of the steps, H200 or CPU; default: %(default)s")  # fmt: skip
    add_record_arguments(parser)


def _tune(args: argparse.Namespace, asked: Asked) -> int:
    if args.from_trace:
        return _fit(args, asked)
    if min(args.tokens) < 1:
        raise recipe_flags.BadFlags(f"--tokens {args.tokens}: they must be at least 1")
    outline = Outline(asked.recipe, asked.source(), asked.options, H200)
    ranks = asked.options.tensor_parallel_size
    shapes = shapes_of(outline)
    meter = DeviceMeter()
    gpu = meter.target.gpu
    file = args.out or tables.table_file(tables.user_tables(), gpu)
    known = tables.load(file)
    progress(f"{gpu}: {len(shapes)} layers, {len(args.tokens)} token counts, into {file}")

    def keep(found: tables.Table) -> None:
        nonlocal known
        known = tables.merged(known, found)
        tables.save(file, known)

    bar, results = ProgressBar("measuring", things="products"), []
    try:
        for found in tuner.tune(meter, shapes, args.tokens, {} if args.again else known, bar, args.budget):
            results.append(_result(found))
            print(_line(found), flush=True)
            op, n, k = found.shape
            keep({op: {f"{n}x{k}": {str(found.m): entry(found.best)}}})
        # Not above: `python -m` runs that module in other processes, and it must not be imported before.
        from openinfer.cli.tune.ranks import tune_ranks

        results += tune_ranks(outline, ranks, args.tokens, {} if args.again else known, keep)
    finally:
        if args.json:
            write(args.json, record("tune", args, results, target=gpu))
    left = sum(map(len, tuner.missing(shapes, args.tokens, known).values()))
    print(f"{len(results)} measured, {left} left (run it again to go on)" if left else f"{file} is complete")
    return 0


def _fit(args: argparse.Namespace, asked: Asked) -> int:
    outline = Outline(asked.recipe, asked.source(), asked.options, speed.target(args.gpu))
    found, text = speed.fitted_figures(outline, args.from_trace)
    print(text)
    if args.out:
        speed.save_figures(args.out, outline.target, found)
        print(f"openinfer plan --gpu {args.gpu} --speeds {args.out} takes them")
    return 0


def shapes_of(outline: Outline) -> list[ProductShape]:
    """The linear layers of a model, by a trace of its largest step."""
    found: dict[ProductShape, None] = {}
    for op, args in recorded_calls(outline.prefill(outline.buckets.max_tokens)[0]):
        if op.name in LINEAR:
            out = getattr(args, "out", None)
            name = "logits" if out is not None and out.dtype == float32 else op.name
            found[ProductShape(name, *args.weight.shape)] = None
    return list(found)


def _result(found: Measured) -> dict[str, Any]:
    return {
        **found.shape._asdict(),
        "m": found.m,
        "best": entry(found.best),
        "us": [{**entry(choice), "us": seconds * 1e6} for choice, seconds in found.seconds.items()],
        "problems": list(found.problems),
    }


def _line(found: Measured) -> str:
    op, n, k = found.shape
    best, untuned = found.seconds[found.best], next(iter(found.seconds.values()))
    cublas = next((s for c, s in found.seconds.items() if c.kind == "cublas"), math.nan)
    moved = 2 * (n * k + found.m * k) + found.m * n * (4 if op == "logits" else 2)
    return (
        f"{op:>12} {n:6} x {k:5}, {found.m:5} tokens: {best * 1e6:8.1f} us, untuned {untuned * 1e6:8.1f}, cuBLASLt "
        f"{cublas * 1e6:8.1f}\n    {moved / best / 1e9:5.0f} GB/s {2 * found.m * n * k / best / 1e12:5.0f} TFLOP/s: "
        + " ".join(f"{name} {value}" for name, value in entry(found.best).items() if name != "kind")
        + f" {found.best.kind}"
        + "".join(f"\n    {problem[:96]}" for problem in found.problems if "wrong" in problem)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
