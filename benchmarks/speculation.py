"""Tokens a second with and without drafts, by requests at once and by the chance that a draft is right.

    python benchmarks/speculation.py demo/qwen3
    python benchmarks/speculation.py Qwen3-4B --device cuda --json FILE
    python benchmarks/speculation.py demo/qwen3 --own 0 0.7 1
    python benchmarks/speculation.py Qwen3-4B --device cuda --edits --prompt-tokens 512 --tokens 256
    python benchmarks/speculation.py --predict qwen3:4B qwen3_5:4B

All but the last measure an engine. The name of a published model stands for its shape with random weights. Every answer
is one token again and again, by a bias of its logit. Drafts of a chosen acceptance come from an oracle that knows it.
Layers that draft run too, and the oracle's drafts replace the layers' own. No server has the oracle. "all, N":
drafts are all right and every step has N, so its seconds are those of a verifying step. `--fixed`: the same with drafts
of each acceptance, the best of which an engine's own choice should reach. `--up-to`: the most drafts to choose from.
`--own`: the engine's own drafts at these temperatures, on `--prompts`, or once on each of `--texts`;
"always N": every step has N of them. `--edits`: a request has a page of docs/ as its prompt, and the known answer is
the page with some edits; the engine's own drafter looks drafts up in page and answer, and those that are the answer's
are accepted. The last command simulates steps of a published model on an H200 at their predicted cost.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openinfer.cli import hub, recipes
from openinfer.cli.explain.segments import Outline
from openinfer.cli.plan.load import StepCost
from openinfer.frontend.contract import Request
from openinfer.frontend.http.tokenizer import Tokenizer
from openinfer.graph.runner.trials import Trials
from openinfer.kernels import GPUS, H200
from openinfer.recipes.engine import Source
from openinfer.recipes.engine.startup import build
from openinfer.recipes.engine.testing import Outcome, Session
from openinfer.sampler import SamplingParams
from openinfer.sampler.noise import hash_u32, seed_words
from openinfer.scheduler import Drafter, Worth
from openinfer.scheduler.sim import StepWork

CONTEXT = 1024
ANSWER = 300
"""The token of all answers."""
HOT = 1e5
"""A temperature at which noise alone chooses."""
ROUNDS = 12
"""Requests of a run for each that runs at once, at least, where answers end by themselves."""
DOCS = Path(__file__).parents[1] / "docs"
EDITED, LEFT_OUT, ADDED = 0.25, 0.06, 0.06
"""The part of the lines in which a word is another, that are gone, and that are new."""


class Oracle:
    """A scheduler.Drafter of requests whose text is known: prompt, then answer, by the prompt's first token. right: the
    chance that a draft is the known one, drawn for each request by itself: rows that are right together would say no
    more than one."""

    def __init__(self, right: float, texts: Sequence[Sequence[int]]) -> None:
        self._right, self._texts = right, texts
        self._rng: random.Random | None = None

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """See Drafter."""
        self._rng = rng = self._rng or random.Random(tokens[0])
        known = self._texts[tokens[0]][len(tokens) : len(tokens) + count]
        return [token if rng.random() < self._right else token + 1 for token in known]


class Copyist:
    """A scheduler.Drafter of requests whose text is known: prompt, then answer, by the prompt's first token.

    The engine's answer is one token again and again. `own` sees the known text, as far as the engine is. A draft of
    `own` becomes that token where it is the known text's, else another.
    """

    def __init__(self, own: Drafter, texts: Sequence[Sequence[int]]) -> None:
        self._own, self._texts = own, texts

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """See Drafter."""
        text, done = self._texts[tokens[0]], len(tokens)
        drafts = zip(self._own.propose(text[:done], count), text[done:], strict=False)
        return [ANSWER if draft == known else ANSWER + 1 for draft, known in drafts]


def of_noise(prompts: Sequence[Sequence[int]], tokens: int, vocab_size: int) -> list[list[int]]:
    """Known texts with the answers that noise alone draws: the least hash. The first token of a prompt is the seed."""
    ids, texts = np.arange(vocab_size, dtype=np.uint32), list[list[int]]()
    for prompt in prompts:
        low, high = (np.uint32(word) for word in seed_words(prompt[0]))
        places = range(len(prompt), len(prompt) + tokens)
        texts.append([*prompt, *(int(hash_u32(low, high, np.uint32(p), ids).argmin()) for p in places)])
    return texts


def edits(args: argparse.Namespace) -> list[list[int]]:
    """Known texts: a request's number, a page of docs/, and the page after edits. A token is a word or a mark, which is
    about what a published tokenizer makes of it."""
    ids: dict[str, int] = {}
    pages = [re.findall(r"\n|\w+|[^\w\s]", path.read_text()) for path in sorted(DOCS.glob("*.md"))]
    texts, size = list[list[int]](), args.prompt_tokens - 1
    for words in itertools.islice(itertools.cycle(p for p in pages if len(p) >= size), max(args.concurrency)):
        rng, answer, page = random.Random(len(texts)), list[str](), words[:size]
        for line in " ".join(page).split("\n"):
            found, chance = line.split(), rng.random()
            if chance < EDITED and found:
                found[rng.randrange(len(found))] = rng.choice(page)
            elif chance > 1 - ADDED:
                answer += [*rng.choices(page, k=12), "\n"]
            if not EDITED <= chance < EDITED + LEFT_OUT:
                answer += [*found, "\n"]
        known = [ids.setdefault(word, 1000 + len(ids)) for word in (page + answer)[: size + args.tokens]]
        texts.append([len(texts), *known])
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="a folder, or the name of a published model: its shape with random weights")
    add("--predict", nargs="*", default=(), metavar="RECIPE:SIZE")
    add("--config", default='{"method": "ngram", "num_speculative_tokens": 3}', help="--speculative-config")
    add("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    add("--acceptance", nargs="+", type=float, default=[0.0, 0.5, 0.8, 0.95])
    add("--up-to", nargs="+", type=int, help="the most drafts of a row; by default those of --config")
    add("--fixed", action="store_true", help="also each fixed number of drafts at each acceptance")
    add("--mixed", nargs=2, type=float, help="acceptances of two halves of the rows of --predict")
    add("--own", nargs="+", type=float, help="temperatures at which the engine's own drafts are measured")
    add("--edits", action="store_true", help="prompts are pages of docs/, answers the pages after edits")
    add("--varied", action="store_true", help="answers are tokens that noise alone chooses, for mixtures")
    add("--one-engine", action="store_true", help="'without' is the same engine where no row has drafts")
    add("--ranks", type=int, default=1, help="--tensor-parallel-size")
    add("--prompts", type=Path, help="JSON: lists of token ids")
    add("--texts", nargs="+", type=Path, default=[], help="prompts are the beginnings of these files")
    add("--tokens", type=int, default=96, help="tokens of an answer")
    add("--prompt-tokens", type=int, default=32)
    add("--repeats", type=int, default=3)
    add("--device", default="cpu")
    add("--json", type=Path, help="write all repeats to this file")
    args = parser.parse_args()
    if args.model is not None:
        measure(args)
    if args.predict:
        heads = ["one number", "a number a row"] if args.mixed else [f"{one:g}" for one in args.acceptance]
        print("| model | requests at once | without |", *(f"{head} |" for head in heads))
        print("| --- | --- | --- |" + " --- |" * len(heads))
    for name in args.predict:
        predict(args, *name.split(":"))


def measure(args: argparse.Namespace) -> None:
    """Print a row for each number of requests at once, and write all repeats."""
    rng = random.Random(0)
    prompts = [[rng.randrange(20, 400) for _ in range(args.prompt_tokens)] for _ in range(256)]
    if args.prompts is not None:
        prompts = json.loads(args.prompts.read_text())
    if args.texts:
        tokens = Tokenizer.load(hub.hub_checkpoint(args.model, [])[0])
        prompts = [tokens.encode_short(path.read_text())[: args.prompt_tokens] for path in args.texts]
    texts = edits(args) if args.edits else []
    prompts = [text[: args.prompt_tokens] for text in texts] or prompts
    configs = {"with": args.config} | ({} if args.one_engine else {"without": None})
    with tempfile.TemporaryDirectory() as empty:
        engines = {
            name: engine_of(args, config, Path(empty), max(map(len, prompts)))
            for name, config in configs.items()
        }
    if args.own is None and not args.edits:
        prompts = [[number, *prompt[1:]] for number, prompt in enumerate(prompts[: max(args.concurrency)])]
        texts = [[*prompt, *[ANSWER] * args.tokens] for prompt in prompts]
        if args.varied:
            texts = of_noise(prompts, args.tokens, engines["with"].info.vocab_size)
    rows, kinds = [], cases(args, engines["with"], texts)
    for count in args.concurrency:
        for repeat in range(args.repeats + 1):  # the first is of a cold machine
            for kind, (drafts, prepare, options) in kinds.items():
                engine = engines["with" if drafts or args.one_engine else "without"]
                prepare()
                found = run(engine, prompts, count, args, options)
                if repeat:
                    rows.append({"kind": kind, "requests_at_once": count, "repeat": repeat, **found})
        table(args, count, kinds, rows)
        if args.json is not None:
            command = " ".join(["benchmarks/speculation.py", *sys.argv[1:]])
            args.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1))
    for engine in engines.values():
        engine.close()


def engine_of(args: argparse.Namespace, config: str | None, empty: Path, longest: int) -> Any:
    """An engine for the model, with drafts if there is a config."""
    path, flags = Path(args.model), dict[str, Any]()
    if path.is_dir():
        path = Path(hub.hub_checkpoint(args.model, [])[0])  # of GGUF, the folder with its config.json
        recipe = recipes.find(path)
    else:
        recipe, published = recipes.published(args.model)
        path, flags = empty, {"load_format": "dummy"}
        (path / "config.json").write_text(json.dumps(published))
    length = -(-(longest + args.tokens + 16) // 64) * 64
    cache = 1 << 30 if args.device == "cpu" else None if args.one_engine else 8 << 30
    began = time.perf_counter()
    built = build(
        recipe, path, device=args.device, max_num_seqs=max(args.concurrency), max_model_len=length,
        max_num_batched_tokens=max(2048, length), kv_cache_memory_bytes=cache, enable_prefix_caching=False,
        speculative_config=config, tensor_parallel_size=args.ranks, **flags,
    )  # fmt: skip
    print(f"{args.model} {config}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    return built.engine


Case = tuple[bool, Callable[[], None], Mapping[str, Any]]
"""Whether the engine drafts, what is done before a run, and the sampling parameters."""


def cases(args: argparse.Namespace, drafted: Any, texts: Sequence[Sequence[int]]) -> dict[str, Case]:
    """The kinds of runs, by their names. texts: known ones, if there are any."""
    drafting = drafted.runner.drafting
    costs, own = drafting.costs, drafting.make_drafter
    levels = drafting.buckets.draft_levels

    def prepare(make_drafter: Any, most: int = levels[-1]) -> None:
        drafting.make_drafter, drafting.costs = make_drafter, costs
        drafting.worth = Worth([level for level in levels if level <= most])
        drafting.trials, drafting.rest_until = Trials(), 0

    def always(make_drafter: Any, level: int) -> None:
        prepare(make_drafter)
        drafting.worth.choose = lambda available, rows, cost: level if available else 0

    def oracle(right: float) -> Callable[[], Drafter]:
        return functools.partial(Oracle, right, texts)

    def every_step(name: str, make_drafter: Any, options: Mapping[str, Any]) -> dict[str, Case]:
        chosen = ((level, functools.partial(always, make_drafter, level)) for level in levels)
        return {f"{name}, {level}": (True, prepared, options) for level, prepared in chosen}

    if args.own is not None:
        off, on = functools.partial(always, own, 0), functools.partial(prepare, own)
        return {
            f"{name} {heat:g}": (drafts, prepared, {"temperature": heat})
            for heat in args.own
            for name, drafts, prepared in (("without", False, off), ("with", True, on))
        } | every_step("always", own, {"temperature": args.own[0]})
    options: dict[str, Any] = {"ignore_eos": True}
    options |= {"temperature": HOT} if args.varied else {"logit_bias": [(ANSWER, 100.0)]}
    off = (False, functools.partial(always, own, 0), options)
    if args.edits:
        copies = functools.partial(prepare, lambda: Copyist(own(), texts))
        return {"without": off, "edits": (True, copies, options)}
    oracles = {
        f"{share:g}" + (f", up to {most}" if args.up_to else ""): (oracle(share), most)
        for most in args.up_to or levels[-1:]
        for share in args.acceptance
    }
    fixed = {f"{share:g} always": oracle(share) for share in args.acceptance if args.fixed}
    return {
        "without": off,
        **{name: (True, functools.partial(prepare, *chosen), options) for name, chosen in oracles.items()},
        **({} if drafting.layers else {"own": (True, functools.partial(prepare, own), options)}),
        **every_step("all", oracle(1.0), options),
        **{
            name: case
            for kind, drafter in fixed.items()
            for name, case in every_step(kind, drafter, options).items()
        },
    }


def run(
    engine: Any,
    prompts: Sequence[list[int]],
    count: int,
    args: argparse.Namespace,
    options: Mapping[str, Any],
) -> dict[str, float]:
    """Requests, `count` at once and each replaced when it ends; with `ignore_eos` `count` in all."""
    session, before = Session(engine), engine.stats()
    # A text that ends by itself is short: with few of them a run would be its beginning and its end.
    rounds = 1 if args.texts else -(-ROUNDS * count // len(prompts))
    texts = prompts[:count] if "ignore_eos" in options else prompts * rounds
    waiting = list(enumerate(texts))
    running, first = 0, 0.0
    began = time.perf_counter()
    while waiting or running:
        while waiting and running < count:
            number, prompt = waiting.pop(0)
            submit(session, prompt, args.tokens, {"seed": number, **options})
            running += 1
        outputs = session.step(0.1)
        if not first and all(one.tokens for one in itertools.islice(session.outcomes.values(), count)):
            first, steps_then = time.perf_counter(), engine.stats().steps
            tokens_then = sum(len(outcome.tokens) for outcome in session.outcomes.values())
        running -= sum(1 for update in outputs.updates if hasattr(update, "drafts"))
    seconds, after = time.perf_counter() - began, engine.stats()
    tokens = sum(len(outcome.tokens) for outcome in session.outcomes.values())
    return {
        "tokens": tokens,
        "seconds": seconds,
        "decode_tokens_per_s": (tokens - tokens_then) / (began + seconds - first),
        "steps": after.steps - before.steps,
        "seconds_per_step": (began + seconds - first) / (after.steps - steps_then),
        "draft_tokens": after.draft_tokens - before.draft_tokens,
        "accepted_draft_tokens": after.accepted_draft_tokens - before.accepted_draft_tokens,
    }


def submit(session: Session, prompt: Sequence[int], tokens: int, options: Mapping[str, Any]) -> None:
    """Queue a request. No request of a client may be as hot as HOT."""
    if options.get("temperature") != HOT:
        session.submit(prompt, tokens, **options)
        return
    params, n = SamplingParams(**{**options, "temperature": 1.0}), len(session.outcomes)
    object.__setattr__(params, "temperature", HOT)
    session.outcomes[n] = Outcome([], [], [])
    asked = {"id": n, "prompt_token_ids": [*prompt], "sampling": params, "max_tokens": tokens}
    session.engine.submit(Request(**asked, arrival=0.0))


def table(
    args: argparse.Namespace, count: int, kinds: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print the medians of one number of requests."""
    print(f"{args.model}, {count} at once: tokens/s, ms a step, drafts accepted")
    for kind in kinds:
        found = [row for row in rows if row["kind"] == kind and row["requests_at_once"] == count]
        speed = statistics.median(row["decode_tokens_per_s"] for row in found)
        step = statistics.median(row["seconds_per_step"] for row in found)
        drafts = sum(row["draft_tokens"] for row in found)
        share = sum(row["accepted_draft_tokens"] for row in found) / max(1, drafts)
        print(f"  {kind:12} {speed:9,.0f} {1e3 * step:8.3f} {share:7.1%} of {drafts}", flush=True)


def predict(args: argparse.Namespace, name: str, size: str) -> None:
    """Rows of the table of a published model on an H200, by the cost of its steps."""
    recipe = next(one for one in recipes.installed() if one.name == name)
    drafts = json.loads(args.config)["num_speculative_tokens"]
    costs = {}
    for config in (None, args.config):
        options = recipe.options(
            speculative_config=config, max_num_seqs=max(args.concurrency), max_model_len=8192
        )
        outline = Outline(recipe, Source(recipe.published()[size]), options, H200)
        costs[config] = StepCost(outline.steps, outline.buckets, GPUS[H200.gpu])
    levels = outline.buckets.draft_levels
    lags = outline.model.states.lags
    for rows in args.concurrency:
        off = costs[None](StepWork(rows, rows * CONTEXT, 0, 0))
        of_level = {
            n: costs[args.config](StepWork(rows, rows * CONTEXT, 0, 0, rows * n)) for n in (0, *levels)
        }
        if args.mixed is not None:
            chances = [args.mixed[n % 2] for n in range(rows)]
            one = simulate(chances, drafts, levels, of_level, lags)
            speeds = [one, most_of_rows(chances, drafts, of_level)]
        else:
            speeds = [simulate([one] * rows, drafts, levels, of_level, lags) for one in args.acceptance]
        cells = (f"{speed:,.0f} |" for speed in speeds)
        print(f"| {name} {size}, predicted | {rows} | {rows / off:,.0f} |", *cells, flush=True)


def most_of_rows(chances: Sequence[float], drafts: int, cost: dict[int, float]) -> float:
    """Tokens a second if each row had a number of drafts of its own, and knew the chances: the best of all pairs of
    numbers. A step costs by its tokens, between the shapes that are recorded."""
    rows, kinds = len(chances), sorted(set(chances))

    def seconds(tokens: float) -> float:
        shapes = [rows * (1 + level) for level in sorted(cost)]
        return float(np.interp(tokens, shapes, [cost[level] for level in sorted(cost)]))

    def rate(numbers: Mapping[float, int]) -> float:
        tokens = sum(sum(chance**place for place in range(1 + numbers[chance])) for chance in chances)
        return tokens / seconds(sum(1 + numbers[chance] for chance in chances))

    choices = itertools.product(range(1 + drafts), repeat=len(kinds))
    return max(rate(dict(zip(kinds, numbers, strict=True))) for numbers in choices)


def simulate(
    chances: Sequence[float], drafts: int, levels: Sequence[int], cost: dict[int, float], lags: bool
) -> float:
    """Tokens a second of 2,000 steps. chances: of a draft, by row. lags: a step after one with drafts has a shape with
    drafts."""
    rng, worth, tokens, seconds = random.Random(0), Worth(levels), 0, 0.0
    last, rows = 0, len(chances)
    for _ in range(2000):
        level = worth.choose([drafts] * rows, rows, cost.get)
        found: Counter[tuple[int, int]] = Counter()
        for chance in chances if level else ():
            right = 0
            while right < level and rng.random() < chance:
                right += 1
            found[level, right] += 1
        accepted = sum(right * count for (_, right), count in found.items())
        taken = cost[level or (levels[0] if lags and last else 0)]
        last = level
        worth.saw(found)
        worth.spent(rows, accepted, taken, cost[0])
        tokens += rows + accepted
        seconds += taken
    return tokens / seconds


if __name__ == "__main__":
    main()
