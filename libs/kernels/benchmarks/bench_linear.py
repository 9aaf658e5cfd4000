"""Measure every kernel that a linear layer of a published model may use on this GPU: `openinfer tune` by a size's name.

python bench_linear.py --model 4b --tokens 1 16 64 256 4096          print
python bench_linear.py --model 4b --write                            and merge the best into the package's table
"""

from __future__ import annotations

import argparse
import json
import sys

from openinfer.kernels.measure.tuner import DeviceMeter, ProductShape, entry, tune
from openinfer.kernels.store.tables import TABLES, load, merged, save, table_file
from openinfer.tensor import ProgressBar

MODELS = {  # hidden, query heads, intermediate
    "0.6b": (1024, 16, 3072),
    "1.7b": (2048, 16, 6144),
    "4b": (2560, 32, 9728),
    "8b": (4096, 32, 12288),
    "14b": (5120, 40, 17408),
    "32b": (5120, 64, 25600),
}
VOCABULARY, KV_HEADS, HEAD_DIM = 151936, 8, 128
HYBRIDS = {  # of Qwen3.5: hidden, rows of a linear layer's input, of a full layer's, value columns, intermediate
    "3.5-0.8b": (1024, 8224, 5120, 2048, 3584),
    "3.5-4b": (2560, 12352, 10240, 4096, 9216),
    "3.5-9b": (4096, 12352, 10240, 4096, 12288),
}
HYBRID_VOCABULARY = 248320
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def layers(model: str) -> list[ProductShape]:
    """A model's linear layers."""
    if model in HYBRIDS:
        hidden, linear, full, value, inter = HYBRIDS[model]
        return [
            ProductShape("norm_linear", linear, hidden),
            ProductShape("norm_linear", full, hidden),
            ProductShape("linear_add", hidden, value),
            ProductShape("gate_up_silu", 2 * inter, hidden),
            ProductShape("linear_add", hidden, inter),
            ProductShape("logits", HYBRID_VOCABULARY, hidden),
        ]
    hidden, heads, inter = MODELS[model]
    return [
        ProductShape("norm_linear", (heads + 2 * KV_HEADS) * HEAD_DIM, hidden),
        ProductShape("linear_add", hidden, heads * HEAD_DIM),
        ProductShape("gate_up_silu", 2 * inter, hidden),
        ProductShape("linear_add", hidden, inter),
        ProductShape("logits", VOCABULARY, hidden),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=[*MODELS, *HYBRIDS], action="append", help="sizes of Qwen3 and Qwen3.5; default 4b"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--write", action="store_true", help="merge the best into the package's table")
    parser.add_argument("--json", help="write this run's table to a file")
    options = parser.parse_args()
    meter = DeviceMeter()
    print(f"{meter.device.name}, sm_{meter.target.arch}, {meter.target.num_sms} SMs")
    shapes = list(dict.fromkeys(shape for model in options.model or ["4b"] for shape in layers(model)))
    table: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    for found in tune(meter, shapes, options.tokens, {}, ProgressBar("measuring", things="products")):
        (op, n, k), best = found.shape, found.best
        times: dict[str, float] = {}
        for choice, seconds in found.seconds.items():
            times[choice.kind] = min(seconds, times.get(choice.kind, seconds))
        print(
            f"{op:>12} {n:6} x {k:5}, {found.m:5} tokens: "
            + ", ".join(f"{kind} {seconds * 1e6:.1f}" for kind, seconds in times.items())
            + f" us: {entry(best)}",
            flush=True,
        )
        table.setdefault(op, {}).setdefault(f"{n}x{k}", {})[str(found.m)] = entry(best)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": meter.target.gpu, "table": table}, file, indent=2)
    if options.write:
        file_ = table_file(TABLES, meter.target.gpu)
        save(file_, merged(load(file_), table))


if __name__ == "__main__":
    sys.exit(main())
