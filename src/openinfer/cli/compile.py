"""`openinfer compile MODEL_DIR --arch 90`: fill the kernel cache for a GPU that need not be here."""

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path

from openinfer.cli import recipe_flags
from openinfer.cli.recipe_flags import Asked
from openinfer.frontend.errors import FlagError
from openinfer.kernels import H200, Spec, Store, Target
from openinfer.kernels.store.cubins import default_cache, nvrtc_version
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.startup import kernel_specs
from openinfer.tensor import ProgressBar

GPUS = {
    80: Target(80, 108, gpu="NVIDIA A100-SXM4-80GB"),
    86: Target(86, 72, gpu="NVIDIA A10"),
    89: Target(89, 142, gpu="NVIDIA L40S"),
    90: H200,
    100: Target(100, 148, gpu="NVIDIA B200"),
    120: Target(120, 170, gpu="NVIDIA GeForce RTX 5090"),
}
"""The default GPU of each architecture. --gpu and --num-sms replace it, because both steer the choice of kernels."""


def main(argv: list[str]) -> int:
    """Compile; returns 0, 1 for what cannot be compiled, 2 for wrong arguments."""
    return recipe_flags.run_command(argv, "compile", __doc__, _flags, _compile)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--arch", type=int, required=True, metavar="N", help="compute capability: 90 is 9.0")
    add("--gpu", metavar="NAME", help="the GPU's name in the driver; default: a common GPU of that N")
    add("--num-sms", type=int, metavar="N", help="its multiprocessors; default: those of that GPU")
    add("--out", type=Path, metavar="DIR", help=f"cache to fill; default: {default_cache().parent}")


def _compile(args: argparse.Namespace, asked: Asked) -> int:
    target, source = _target(args), Source.read(asked.model_dir)
    start = time.perf_counter()
    specs: list[Spec] = []
    languages = (False,) if nvrtc_version() is None else (False, True)
    # The GPU's machine may have cuBLASLt and NVRTC or not.
    for cublas, nvrtc in itertools.product((False, True), languages):
        found = replace(target, cublas=cublas, nvrtc=nvrtc)
        specs += kernel_specs(asked.recipe, source, asked.options, found)
    cache = default_cache() if args.out is None else args.out / "cubin"
    done = Store(target.arch, cache=cache).prepare(specs, ProgressBar("compiling", things="kernels"))
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
        raise FlagError(f"--arch {args.arch}: known are {', '.join(map(str, GPUS))}; others need --num-sms")
    known = known or Target(args.arch, 0)
    return replace(known, num_sms=args.num_sms or known.num_sms, gpu=args.gpu or known.gpu)
