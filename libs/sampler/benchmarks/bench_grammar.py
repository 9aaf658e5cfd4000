"""What grammars cost on a CPU: python benchmarks/bench_grammar.py [--vocabulary V] [--texts N].

The vocabulary is made up, seeded: all bytes, and pieces of syllables, digits and punctuation, as byte-level BPE has.
Each text is random output under one of the JSON schemas below; every mask on the way is timed.
"""

import argparse
import json
import random
import time

import numpy as np

from openinfer.sampler.grammar import Compiler, Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.org$"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "vip"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 4},
    {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 6, "minProperties": 3},
    {
        "anyOf": [
            {"type": "object", "properties": {"tool": {"const": f"t{i}"}, "x": PERSON}} for i in range(20)
        ]
    },
]


def make_tokens(size):
    """EOS, all bytes, and `size` - 257 pieces of 2 to 12 bytes."""
    rng = random.Random(0)
    syllables = [
        a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "t", "ng")
    ]
    marks = [
        '"',
        '":',
        '",',
        '": "',
        '", "',
        "{",
        "}",
        "[",
        "]",
        "},",
        "\n",
        "  ",
        ".",
        ",",
        "0",
        "1",
        "23",
        "日",
    ]
    pieces = set()
    while len(pieces) < size - 257:
        body = "".join(rng.choices(syllables, k=rng.randint(1, 3)))
        match rng.random():
            case p if p < 0.5:
                pieces.add(" " + body)
            case p if p < 0.9:
                pieces.add(body)
            case _:
                pieces.add("".join(rng.choices(marks, k=rng.randint(2, 4))))
    return [b"<eos>", *(bytes([i]) for i in range(256)), *(piece.encode() for piece in sorted(pieces))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--texts", type=int, default=40)
    args = parser.parse_args()
    tokens, rng = make_tokens(args.vocabulary), np.random.default_rng(0)
    start = time.perf_counter()
    compiler = Compiler(tokens, [0], [0])
    print(f"{len(tokens)} tokens; ready in {time.perf_counter() - start:.2f} s")
    mask, masks, accepts, compiles = np.zeros(-(-len(tokens) // 32), np.int32), [], [], []
    for index in range(args.texts):
        grammar = Grammar("json_schema", json.dumps(SCHEMAS[index % len(SCHEMAS)]))
        start = time.perf_counter()
        matcher = compiler.compile(grammar)
        if index < len(SCHEMAS):
            compiles.append(time.perf_counter() - start)
        for _ in range(200):
            start = time.perf_counter()
            matcher.fill(mask)
            masks.append(time.perf_counter() - start)
            token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
            start = time.perf_counter()
            matcher.accept(token)
            accepts.append(time.perf_counter() - start)
            if token == 0:
                break
    for name, times in (("compile", compiles), ("mask", masks), ("accept", accepts)):
        p50, p99 = np.percentile(times, [50, 99]) * 1e6
        print(
            f"{name:8} {len(times):6} times: p50 {p50:8.1f} us, p99 {p99:8.1f} us, max {max(times) * 1e6:9.1f} us"
        )
    compiler.close()


if __name__ == "__main__":
    main()
