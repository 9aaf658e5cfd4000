"""The points of `openinfer bench step`, through vLLM's offline API: run it by the Python in which vLLM is installed.

    python benchmarks/peer/vllm_steps.py MODEL_DIR [--points POINT ...] [--json FILE] [--dry-run]

It needs vLLM and nothing of openinfer. MODEL_DIR needs config.json only: weights are random. vLLM keeps its defaults
but for the prefix cache, which is off. --dry-run prints what would be asked of vLLM, and needs no GPU and no vLLM.

The time of a decode step is a difference: as many prompts are answered with N tokens and with 2 N. The N further
steps have the named context on average. A server of vLLM is measured by `openinfer bench serve --base-url`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

POINTS = (
    "decode:1,1024", "decode:8,1024", "decode:32,1024", "decode:64,1024", "decode:128,1024", "decode:256,512",
    "prefill:128", "prefill:1024", "prefill:4096", "prefill:16384", "offline:512,512,128", "offline:256,1024,128",
)  # fmt: skip
NUMBERS = {"decode": 2, "prefill": 1, "offline": 3}
STEPS = 64
"""Decode steps that a time is divided by."""

Answer = Callable[[list[list[int]], int], object]
"""Answers prompts with this number of tokens each, and returns when all are there."""


def parse(text: str) -> tuple[str, tuple[int, ...]]:
    """`kind:number,...`. Raises ValueError."""
    kind, _, rest = text.partition(":")
    numbers = tuple(int(word) for word in rest.split(",") if word.isdigit())
    if len(numbers) != NUMBERS.get(kind) or min(numbers) < 1 or rest != ",".join(map(str, numbers)):
        raise ValueError(
            f"point {text!r} is none of decode:ROWS,CONTEXT prefill:TOKENS offline:REQUESTS,IN,OUT"
        )
    return kind, numbers


def runs(kind: str, numbers: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The runs behind a point: prompts, tokens of each, tokens to answer. The last one counts, less the first if there
    are two."""
    match kind:
        case "decode":
            rows, context = numbers
            length = max(1, context - 3 * STEPS // 2)
            return [(rows, length, 1 + STEPS), (rows, length, 1 + 2 * STEPS)]
        case "prefill":
            return [(1, numbers[0], 1)]
        case _:
            return [(numbers[0], numbers[1], numbers[2])]


def measure(answer: Answer, points: Sequence[str], vocab_size: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A result for each point, with the names of `openinfer bench step`. The first repeat warms up and does not count.
    Token ids are random, and new for each run."""
    rng = random.Random(7)
    for text in points:
        kind, numbers = parse(text)
        values = []
        for _ in range(1 + repeats):
            seconds = []
            for count, length, tokens in runs(kind, numbers):
                prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
                start = time.perf_counter()
                answer(prompts, tokens)
                seconds.append(time.perf_counter() - start)
            if kind == "offline":
                values.append(numbers[0] * numbers[2] / seconds[-1])
            else:
                more = seconds[-1] - seconds[0] if len(seconds) > 1 else seconds[-1]
                values.append(1e3 * more / (STEPS if kind == "decode" else 1))
        name = "output_tokens_per_s" if kind == "offline" else "wall_ms"
        yield {"point": text, name: statistics.median(values[1:]), "repeats": {name: values[1:]}}


def main() -> int:
    """Measure; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR")
    parser.add_argument(
        "--points", nargs="+", default=POINTS, metavar="POINT", help="default: all with a target"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed runs a point; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, and measure nothing")
    args = parser.parse_args()
    try:
        points = [(text, parse(text)) for text in args.points]
        config = json.loads((args.model_dir / "config.json").read_text())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.dry_run:
        for text, point in points:
            asked = (f"{count} x {length} in / {tokens} out" for count, length, tokens in runs(*point))
            print(f"{text:>22}  {', then '.join(asked)}")
        return 0
    import vllm

    engine = vllm.LLM(
        str(args.model_dir), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False
    )

    def answer(prompts: list[list[int]], tokens: int) -> object:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    results = []
    for result in measure(answer, args.points, config["vocab_size"], args.repeats):
        print({name: value for name, value in result.items() if name != "repeats"}, flush=True)
        results.append(result)
    if args.json:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = {"bench": "step", "engine": f"vLLM {vllm.__version__}", "date": now,
                "command": shlex.join(sys.argv), "results": results}  # fmt: skip
        args.json.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
