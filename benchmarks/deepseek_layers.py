"""Every layer of a whole DeepSeek-V4 on several ranks against the same layer on one rank.

    python benchmarks/deepseek_layers.py DIR --ranks 2 [--json FILE]

DIR needs only config.json; the weights are random (`--load-format dummy`), the same on any number of ranks. One GPU
cannot hold V4-Flash. It holds one layer of each kind, and takes the weights of one layer after the other.

The ranks run prompts and tokens that follow them. Each sublayer's input and output are kept. On one rank each sublayer
gets the same input, so that no error of earlier layers is in it. The distance of the two outputs is compared with what
the sublayer adds, and with what the rounding of the streams can do. A sublayer chooses experts and entries by numbers
that every rank computes alike, so none is chosen otherwise. `free`: one rank runs on from its own outputs, as an engine
does, through all layers.

Then the ranks are wrong on purpose, as in the accuracy gate. Each fault must show in the sublayers that have it, and
in no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer.kernels import Op, Pack
from openinfer.recipes.deepseek_v4 import RECIPE
from openinfer.recipes.deepseek_v4.blueprint import WRONG_ENTRIES, DeepseekV4
from openinfer.recipes.deepseek_v4.config import CSA
from openinfer.recipes.deepseek_v4.layers import MEDIAN, P90
from openinfer.recipes.deepseek_v4.weights import validate
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.forced import Forced
from openinfer.recipes.engine.startup import Built, build
from openinfer.tensor import DummyCheckpoint, Stream, Tensor

Array = np.ndarray[Any, Any]

PARTS = ("attention", "mixture")
LENGTHS, SHORT = (1, 5, 129, 300, 2400), (1, 600)
"""Tokens of the prompts, in one step; of those with which faults are shown. From 2,048 tokens on Flash attends to some
entries only."""
ROUNDING = {2: 2.0**-9, 4: 2.0**-25}
"""A quarter of a unit in the last place of a bf16 and of a float32 number, relative to it: the mean error of rounding.
The streams are rounded after each sublayer, and may be a hundred times what it adds. So right outputs can be this far
apart."""
COMPARED = 100
"""Positions of a step that are compared, at most about."""
FOLLOWING = 2
"""Tokens after each prompt, a step each."""
FLAGS: dict[str, Any] = {
    "load_format": "dummy", "max_num_seqs": 8, "max_num_batched_tokens": 3072, "max_model_len": 3072,
    "kv_cache_memory_bytes": 2 << 30,
}  # fmt: skip
FAULTS = {
    "rotation backwards": ("attention", None),
    "gate and up swapped in shared experts": ("mixture", None),
    WRONG_ENTRIES: ("attention", "entries"),
    "a rank has another's columns": ("attention", None),
    "a rank's part of a sum is missing": ("attention", None),
    "a rank's experts are off by one": ("mixture", "last"),
    "window_tables that repeat a page": ("attention", None),
    "entry_tables that repeat a page": ("attention", "entries"),
}
"""By the name of a control: the sublayers that show it, of all layers, those with entries (of CSA for
sure) or the last one."""


class Streams:
    """A pack that runs another and keeps the streams before and after each sublayer, by step. given: the
    streams that each sublayer of each step gets instead of its own."""

    def __init__(self, inner: Pack, stream: Stream, given: Sequence[Sequence[Array]] | None = None) -> None:
        self._inner, self._stream, self._given = inner, stream, given
        self._tokens = 0
        self.before: list[list[Array]] = []
        self.after: list[list[Array]] = []

    def begin(self, tokens: int) -> None:
        """The next step has this many tokens."""
        self._tokens = tokens
        self.before.append([])
        self.after.append([])

    def run(self, op: Op[Any], args: Mapping[str, Any]) -> None:
        if op.name == "hc_pre":
            self.before[-1].append(self._begun(args["streams"][: self._tokens]))
        self._inner.run(op, args)
        if op.name == "hc_post":
            self.after[-1].append(self._read(args["streams"][: self._tokens]))

    def _begun(self, streams: Tensor) -> Array:
        """The streams that the next sublayer reads."""
        step, number = len(self.before) - 1, len(self.before[-1])
        if self._given is not None:
            streams.copy_from(self._given[step][number], self._stream)
            return self._given[step][number]
        return self.after[step][number - 1] if number else self._read(streams)

    def _read(self, streams: Tensor) -> Array:
        self._stream.synchronize()
        return np.array(streams.numpy())


class Ran(NamedTuple):
    """The streams before and after each sublayer by step, and the logits of all steps."""

    before: list[list[Array]]
    after: list[list[Array]]
    logits: Array

    def of(self, layer: int) -> Ran:
        """One layer's two sublayers."""
        own = slice(2 * layer, 2 * layer + 2)
        return Ran([step[own] for step in self.before], [step[own] for step in self.after], self.logits)


def run(
    engine: Engine,
    lengths: Sequence[int],
    *,
    layers: Sequence[Any] | None = None,
    given: Sequence[Sequence[Array]] | None = None,
    wrong_table: str | None = None,
) -> Ran:
    """Prompts of random tokens in one step, and FOLLOWING tokens of each after it. layers: of the model, in place of
    all; given: see Streams."""
    rng, runner = np.random.default_rng(3), engine.runner
    if layers is not None:
        weights = dataclasses.replace(runner.model.weights, layers=tuple(layers))
        runner = dataclasses.replace(runner, model=dataclasses.replace(runner.model, weights=weights))
    pack = Streams(runner.pack, runner.stream, given)
    forced = Forced(engine, runner.eager(pack), wrong_table)
    rows = [
        forced.join(slot, rng.integers(0, engine.info.vocab_size, length + FOLLOWING).tolist())
        for slot, length in enumerate(lengths, start=1)
    ]
    logits = []
    for counts in (lengths, *[(1,) * len(lengths)] * FOLLOWING):
        pack.begin(sum(counts))
        logits.append(np.array(forced.step(list(zip(rows, counts, strict=True)))))
    forced.leave()
    return Ran(pack.before, pack.after, np.concatenate(logits))


def cut(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """config.json of the first layers, among which each kind is; and the layer of the same kind for each layer."""
    count = config["num_hidden_layers"]
    kinds = [(r, n < config["num_hash_layers"]) for n, r in enumerate(config["compress_ratios"][:count])]
    places = [kinds.index(kind) for kind in kinds]
    few = max(places) + 1
    return {
        **config,
        "num_hidden_layers": few,
        "compress_ratios": config["compress_ratios"][:few],
        "num_nextn_predict_layers": 0,
    }, places


def load_layer(engine: Engine, checkpoint: DummyCheckpoint, place: int, number: int) -> None:
    """Put the weights of layer `number` into the place of another of its kind."""
    places, old, new = engine.runner.model.weights.places, f"layers.{place}.", f"layers.{number}."
    loads = [
        one._replace(name=new + one.name.removeprefix(old))
        for one in places.loads
        if one.name.startswith(old)
    ]
    conversions = [
        one._replace(names=tuple(new + name.removeprefix(old) for name in one.names))
        for one in places.conversions
        if one.names[0].startswith(old)
    ]
    own = dataclasses.replace(places, loads=loads, conversions=conversions, pads=[])
    own.load(checkpoint, engine.runner.stream)


def recorded(built: Built) -> dict[str, Ran]:
    """The runs of the ranks: "right", with the prompts of SHORT "short", and by the name of each fault."""
    engine, stream = built.engine, built.engine.runner.stream
    found = {"right": run(engine, LENGTHS), "short": run(engine, SHORT)}
    for control in built.blueprint.controls(engine.runner.model):
        kept = [(tensor, np.array(tensor.numpy())) for tensor, _ in control.changes]
        for tensor, array in control.changes:
            tensor.copy_from(np.ascontiguousarray(array, tensor.dtype), stream)
        found[control.name] = run(engine, SHORT)
        for tensor, array in kept:
            tensor.copy_from(array, stream)
        stream.synchronize()
    for table in engine.runner.model.tables:
        if table is not None:
            found[f"{table} that repeat a page"] = run(engine, SHORT, wrong_table=table)
    return found


def some(rows: Array) -> Array:
    """Rows with the same distance between them, about COMPARED."""
    return rows[:: max(1, len(rows) // COMPARED)]


def away(ranks: Ran, one: Ran) -> Iterator[dict[str, Any]]:
    """How far the sublayers of a layer are apart, relative to what they add."""
    for n, part in enumerate(PARTS):
        before, got, want = (
            np.concatenate([some(step[n]).reshape(-1, step[n][0].size).astype(np.float32) for step in steps])
            for steps in (ranks.before, ranks.after, one.after)
        )
        added, size = (np.linalg.norm(x, axis=1) for x in (want - before, want))
        far = np.linalg.norm(got - want, axis=1) / added
        far = np.where(np.isfinite(far), far, np.inf)
        rounding = ROUNDING[ranks.after[0][n].dtype.itemsize] * float(np.median(size / added))
        median, p90 = (float(np.quantile(far, q)) for q in (0.5, 0.9))
        yield {
            "part": part, "median": median, "p90": p90, "max": float(far.max()), "rounding": rounding,
            "same": median <= max(MEDIAN, rounding) and p90 <= max(P90, rounding),
        }  # fmt: skip


def compared(folder: Path, small: Engine, runs: Mapping[str, Ran]) -> tuple[dict[str, list[Any]], Array]:
    """By the name of a run: each sublayer on the ranks against one rank. And the logits of one rank that runs free."""
    config = json.loads((folder / "config.json").read_text())
    _, places = cut(config)
    whole = RECIPE.blueprint(Source.read(folder), RECIPE.options(load_format="dummy"))
    assert isinstance(whole, DeepseekV4)
    checkpoint = DummyCheckpoint(folder)
    validate(checkpoint, whole.config, whole.form)
    found: dict[str, list[Any]] = {name: [] for name in (*runs, "free")}
    logits, free = np.empty(0), [step[:1] for step in runs["short"].before]
    for number, place in enumerate(places):
        load_layer(small, checkpoint, place, number)
        layers = [small.runner.model.weights.layers[place]]
        for name, ran in runs.items():
            own = ran.of(number)
            lengths = LENGTHS if name == "right" else SHORT
            one = run(small, lengths, layers=layers, given=own.before)
            found[name] += [{"layer": number, **each} for each in away(own, one)]
        attended = run(small, SHORT, layers=layers, given=[[x, x] for (x,) in free])
        given = [[x, halves[0]] for (x,), halves in zip(free, attended.after, strict=True)]
        mixed = run(small, SHORT, layers=layers, given=given)
        found["free"] += [{"layer": number, **each} for each in away(runs["short"].of(number), mixed)]
        free, logits = [step[1:] for step in mixed.after], mixed.logits
        said = "; ".join(
            f"{one['part']} {one['p90']:.4f} apart at 90 % of the positions, rounding {one['rounding']:.4f}"
            for one in found["right"][-2:]
        )
        print(f"layer {number}: {said}", flush=True)
    return found, logits


def judged(
    config: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[str, bool, str]]:
    """Name of a run, whether it is as it must be, and in words."""
    last = config["num_hidden_layers"] - 1
    for name, parts in found.items():
        if name == "free":
            continue
        part, which = FAULTS.get(name, (None, None))
        wrong = {(one["part"], one["layer"]) for one in parts if not one["same"]}
        may = {
            (one["part"], one["layer"])
            for one in parts
            if one["part"] == part
            and (which != "last" or one["layer"] == last)
            and (which != "entries" or config["compress_ratios"][one["layer"]])
        }
        # With an entry for 128 tokens these prompts have too few entries to tell.
        meant = {one for one in may if which != "entries" or config["compress_ratios"][one[1]] == CSA}
        right = meant <= wrong <= may
        median, p90 = (max(one[key] for one in parts) for key in ("median", "p90"))
        said = f"{len(wrong)} of {len(parts)} sublayers differ, {len(meant)} should; "
        said += f"worst median {median:.4f}, p90 {p90:.4f}"
        if not right:
            said += f"; not as they should: {sorted((meant - wrong) | (wrong - may))[:6]}"
        yield name, right, said


def check(folder: Path, ranks: int, **flags: Any) -> dict[str, Any]:
    """Run both engines, one after the other, and compare. Prints a line each run."""
    config, began = json.loads((folder / "config.json").read_text()), time.monotonic()
    built = build(RECIPE, folder, tensor_parallel_size=ranks, **FLAGS | flags)
    runs = recorded(built)
    built.engine.close()
    print(f"{ranks} ranks have run after {time.monotonic() - began:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(cut(config)[0]))
        small = build(RECIPE, name, **FLAGS | flags).engine
    found, logits = compared(folder, small, runs)
    small.close()
    right = True
    for name, passed, said in judged(config, found):
        right &= passed
        print(f"{'pass' if passed else 'FAIL'} {name}: {said}", flush=True)
    theirs = runs["short"].logits
    apart = float(np.sqrt(np.mean((theirs - logits) ** 2)) / np.std(theirs))
    top = float((theirs.argmax(1) == logits.argmax(1)).mean())
    layers = config["num_hidden_layers"]
    print(
        f"one rank through all {layers} layers by itself, after {time.monotonic() - began:.0f} s: logits are "
        f"{apart:.4f} of their standard deviation apart, the likeliest token is the same at {top:.0%} of "
        f"{len(logits)} places",
        flush=True,
    )
    return {"right": right, "logits": apart, "likeliest": top, "sublayers": found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = check(args.folder, args.ranks, device=args.device)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
