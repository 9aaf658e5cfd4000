"""The cost of grammars on a CPU: python benchmarks/bench_grammar.py [--tokenizer DIR] [--texts N] [--json FILE].

DIR holds a byte-level tokenizer.json, such as scripts/bpe_tokenizer.py writes. Without it the vocabulary is made up,
seeded: all bytes, and pieces of syllables, digits and punctuation. Each text is random output under one of the JSON
schemas below, or of the 200 of tests/test_grammar.py. Every mask on the way is timed by the clock and by the processor
time of its thread. Other programs on the machine do not lengthen the processor time.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np

from openinfer.sampler.constraint import Constraint, Masks
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


def tokens_of(folder):
    """The bytes of a byte-level tokenizer's tokens, and its special ids."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    tokens = [b""] * (max(*vocabulary.values(), *added) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = bytes(byte_of[char] for char in token)
    for token_id, content in added.items():
        tokens[token_id] = content.encode()
    return tokens, sorted(token["id"] for token in tokenizer["added_tokens"] if token["special"])


def varied_schemas():
    """The 200 of the tests."""
    path = Path(__file__).parents[1] / "tests" / "test_grammar.py"
    spec = importlib.util.spec_from_file_location("test_grammar", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [module.schema_of(index) for index in range(200)]


class Times:
    """The times of one kind of call: by the clock, and of the processor."""

    def __init__(self, what):
        self.what, self.wall, self.cpu = what, [], []

    def __enter__(self):
        self.began = time.perf_counter_ns(), time.thread_time_ns()

    def __exit__(self, *_):
        self.cpu.append((time.thread_time_ns() - self.began[1]) / 1e3)
        self.wall.append((time.perf_counter_ns() - self.began[0]) / 1e3)

    def result(self):
        found = {"what": self.what, "count": len(self.cpu)}
        for name, times in (("", self.cpu), ("wall_", self.wall)):
            p50, p99 = np.percentile(times, [50, 99])
            found |= {f"{name}p50_us": p50, f"{name}p99_us": p99, f"{name}max_us": max(times)}
        return found


def measure(compiler, vocabulary, eos, name, schemas, texts):
    """Masks, accepted tokens and compilations (which a worker does: clock only) of `texts` texts."""
    mask, rng, forced = np.zeros(-(-vocabulary // 32), np.int32), np.random.default_rng(0), 0
    run = saved = 0  # masks with one token since the last with several; what is beyond the first of such runs
    masks, accepts, compiles = (
        Times(f"{what}, {name}") for what in ("mask", "accept", "compile, waited for")
    )
    for index in range(texts):
        grammar = Grammar("json_schema", json.dumps(schemas[index % len(schemas)]))
        with compiles:
            matcher = compiler.compile(grammar)
        for _ in range(200):
            with masks:
                matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            run = run + 1 if len(allowed) == 1 and token not in eos else 0
            forced, saved = forced + (len(allowed) == 1), saved + (run > 1)
            with accepts:
                matcher.accept(token)
            if token in eos:
                break
    share = {"forced": forced / len(masks.cpu), "forced_after_another": saved / len(masks.cpu)}
    return [masks.result() | share, accepts.result(), compiles.result()]


def measure_steps(compiler, vocabulary, eos, schemas, rows=64, steps=100):
    """The masks of a step with `rows` sequences, each under a schema of its own; a new one replaces one that ends."""
    rng, made = np.random.default_rng(0), iter(schemas * steps)

    def another():
        return Constraint(compiler.compile(Grammar("json_schema", json.dumps(next(made)))), (), vocabulary)

    running, masks, fills = (
        [another() for _ in range(rows)],
        Masks(rows, vocabulary),
        Times(f"masks of {rows} rows"),
    )
    for _ in range(steps):
        with fills:
            filled, _ = masks.fill(running)
        for row, mask in enumerate(filled):
            token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
            running[row].accept(token)
            if token in eos:
                running[row] = another()
    return fills.result()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="size of the made-up vocabulary")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    tokens, special = tokens_of(args.tokenizer) if args.tokenizer else (make_tokens(args.vocabulary), [0])
    eos = special[-1:]
    start = time.perf_counter()
    compiler = Compiler(tokens, special, eos)
    print(f"{len(tokens)} tokens; ready in {time.perf_counter() - start:.2f} s")
    results = measure(compiler, len(tokens), eos, "200 varied schemas", varied_schemas(), args.texts)
    results += measure(
        compiler, len(tokens), eos, "4 schemas with long strings and keys", SCHEMAS, args.texts // 5
    )
    results.append(measure_steps(compiler, len(tokens), eos, varied_schemas()))
    for found in results:
        print(
            f"{found['what']:52} {found['count']:6}: p50 {found['p50_us']:7.1f} us, p99 {found['p99_us']:7.1f} us, "
            f"max {found['max_us']:8.1f} us (clock: {found['wall_p50_us']:.1f}, {found['wall_p99_us']:.1f})"
        )
        if "forced" in found:
            after = found["forced_after_another"]
            print(f"{found['forced']:.0%} of these masks had one token, {after:.0%} came after another such")
    compiler.close()
    if args.json:
        record = {
            "bench": "grammar",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", "libs/sampler/benchmarks/bench_grammar.py", *sys.argv[1:]]),
            "gpu": None,
            "tokens": len(tokens),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
