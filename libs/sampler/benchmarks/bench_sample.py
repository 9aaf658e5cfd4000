"""The cost of sampling in numpy: python benchmarks/bench_sample.py [--vocabulary V] [--rows R]."""

import argparse
import time

import numpy as np

from openinfer.sampler import SamplingParams, sample

SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, 5 logprobs": SamplingParams(temperature=0, logprobs=5),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "... min_p 0.05": SamplingParams(temperature=0.6, min_p=0.05),
    "... top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "... top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=1),
    "greedy, 300 biases": SamplingParams(temperature=0, logit_bias=tuple((7 * i, 1.0) for i in range(300))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    logits = np.random.default_rng(0).normal(0, 2.5, (args.rows, args.vocabulary)).astype(np.float32)
    positions = range(args.rows)
    tokens = [list(range(500))] * args.rows
    print(f"{args.rows} rows of {args.vocabulary} logits, median of 15, numpy {np.__version__}")
    for name, params in SETTINGS.items():
        times = []
        for seed in range(15):
            start = time.perf_counter()
            sample(
                logits, [params] * args.rows, positions, [seed] * args.rows, prompts=tokens, outputs=tokens
            )
            times.append(time.perf_counter() - start)
        print(f"{name:28} {1e3 * float(np.median(times)) / args.rows:8.3f} ms a row")


if __name__ == "__main__":
    main()
