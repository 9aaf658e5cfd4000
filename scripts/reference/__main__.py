"""Write a checkpoint of a published shape with seeded random weights, and a reference's results for it.

    python scripts/reference {qwen3,qwen3_5,deepseek_v3,deepseek_v4} --shape 4b --out DIR [--quantize FORM] [...]

This script makes test data. It needs torch and transformers, which no distribution of this project needs. DIR gets the
checkpoint in the published format and reference.npz, which openinfer.cli.selftest.gate reads. reference.npz has token
sequences. For the last positions of each sequence it has

- the 64 most likely tokens of transformers' run in bf16;
- their log-probabilities in that run and in float32;
- the experts that mixtures chose in both runs.

With --long, DIR must have the checkpoint of this seed already, and gets long.npz, with prompts up to the model's
maximum.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

import numpy as np
from common import FORCED, save

FAMILIES = ("qwen3", "qwen3_5", "deepseek_v3", "deepseek_v4")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--shape", default="4b", help="a published shape, or tiny; the module lists them")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument(
        "--quantize", metavar="FORM", help="fp8 for qwen3_5 and deepseek_v3; nvfp4 or int8 for qwen3"
    )
    parser.add_argument(
        "--long", action="store_true", help="qwen3: long prompts on the checkpoint that is there"
    )
    parser.add_argument("--longest", type=int, help="leave out longer prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    family = importlib.import_module(args.family)
    if args.shape not in family.SHAPES:
        parser.error(f"{args.family} has no shape {args.shape}; it has {', '.join(family.SHAPES)}")
    if args.long and not hasattr(family, "LONG_LENGTHS"):
        parser.error(f"{args.family} has no --long")
    forms = getattr(family, "FORMS", ())
    if args.quantize and args.quantize not in forms:
        parser.error(f"{args.family} has no form {args.quantize}; it has {', '.join(forms) or 'none'}")
    start = time.perf_counter()

    def note(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {what}", flush=True)

    config = family.config_of(args.shape, args.layers)
    weights = family.random_weights(config, args.device, args.seed)
    if args.quantize:
        config, weights, meant = family.quantized(config, weights, args.quantize)
    else:
        meant = weights
    if not args.long:
        save(weights, config, args.out, family.shards(weights))
        note("checkpoint written")
    if meant is not weights:
        del weights
    rng = np.random.default_rng(args.seed)
    lengths = family.LONG_LENGTHS if args.long else family.LENGTHS
    low, high = family.token_range(config)
    sequences = [rng.integers(low, high, n + FORCED).tolist() for n in lengths if n <= (args.longest or n)]
    arrays = family.reference(config, meant, sequences, args.device, note)
    name = "long.npz" if args.long else "reference.npz"
    np.savez(args.out / name, **arrays)
    note(f"{name} written")


if __name__ == "__main__":
    main()
