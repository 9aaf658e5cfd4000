"""`openinfer compile MODEL_DIR --arch 90`: fill the kernel cache for a GPU that need not be here."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import replace
from pathlib import Path

from openinfer.cli import recipes
from openinfer.frontend.recipe import Recipe
from openinfer.kernels import H200, KernelsError, KernelSpec, Store, Target
from openinfer.kernels.store import default_cache

PROG = "openinfer compile"

GPUS = {
    80: Target(80, 108, gpu="NVIDIA A100-SXM4-80GB"),
    86: Target(86, 72, gpu="NVIDIA A10"),
    89: Target(89, 142, gpu="NVIDIA L40S"),
    90: H200,
    100: Target(100, 148, gpu="NVIDIA B200"),
    120: Target(120, 170, gpu="NVIDIA GeForce RTX 5090"),
}
"""The GPU that is meant unless --gpu and --num-sms say otherwise: both steer the choice of kernels."""


def main(argv: list[str]) -> int:
    """Compile; returns 0, 1 for what cannot be compiled, 2 for wrong arguments."""
    if recipes.wants_help(argv):
        for recipe in recipes.installed():
            print(f"With a {recipe.name} checkpoint:\n")
            _parser(recipe).print_help()
        return 0
    model_dir = recipes.model_dir("compile", argv)
    if model_dir is None:
        return 2
    try:
        recipe = recipes.find(model_dir)
        return _compile(recipe, _parser(recipe).parse_args(argv))
    except (ValueError, OSError, KernelsError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1


def _parser(recipe: Recipe) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROG,
        description="Compile the kernels that an engine with these flags runs. Needs Triton, and no GPU.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model_dir", type=Path, metavar="MODEL_DIR", help="checkpoint directory (config.json)"
    )
    parser.add_argument("--arch", type=int, required=True, metavar="N", help="compute capability: 90 is 9.0")
    parser.add_argument(
        "--gpu", metavar="NAME", help="as the driver calls it; default: a common one of that N"
    )
    parser.add_argument("--num-sms", type=int, metavar="N", help="its multiprocessors; default: likewise")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"cache to fill; default: {default_cache().parent}"
    )
    recipe.add_arguments(parser)
    return parser


def _compile(recipe: Recipe, args: argparse.Namespace) -> int:
    target = _target(args)
    spec = recipe.engine_spec(args.model_dir, args)
    module = importlib.import_module(spec.target.partition(":")[0])
    if not hasattr(module, "kernel_specs"):
        raise ValueError(f"recipe {recipe.name!r} cannot tell its kernels ahead of time")
    start = time.perf_counter()
    specs: list[KernelSpec] = []
    for cublas in (False, True):  # the GPU's machine may have cuBLAS or not
        specs += module.kernel_specs(target=replace(target, cublas=cublas), **spec.kwargs)
    cache = default_cache() if args.out is None else args.out / "cubin"
    done = Store(target.arch, cache=cache).prepare(specs, _progress)
    seconds = time.perf_counter() - start
    print(
        f"{done.kernels} kernels for sm_{target.arch} in {cache}, "
        f"{done.compiled} of them compiled now, in {seconds:.1f} s"
    )
    if args.out is not None:
        print(f"to use them: OPENINFER_CACHE={args.out.resolve()}")
    return 0


def _target(args: argparse.Namespace) -> Target:
    known = GPUS.get(args.arch)
    if known is None and args.num_sms is None:
        raise ValueError(
            f"--arch {args.arch}: known are {', '.join(map(str, GPUS))}; for others give --num-sms too"
        )
    known = known or Target(args.arch, 0)
    return replace(known, num_sms=args.num_sms or known.num_sms, gpu=args.gpu or known.gpu)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rcompiling {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total or done % 25 == 0:
        print(f"compiling {done}/{total}", file=sys.stderr, flush=True)
