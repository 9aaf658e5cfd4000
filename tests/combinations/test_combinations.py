"""Features two by two, over HTTP: any pair gives the tokens that it gives on a plain engine, or is refused by name.

Any two flags have an engine of their own here, pairs of what a request may ask go through all of these in turn, and
servers have every flag at once. features.py has the lists.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import importlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import features as F
import httpx
import numpy as np
import pytest
from deepseek_v3_form import write_checkpoint
from dspark_form import write_dspark
from safetensors.numpy import save_file
from test_eagle3 import write_head

from openinfer.frontend.http import create_app
from openinfer.frontend.thread_driver import ThreadDriver
from openinfer.graph.runner import Drafting
from openinfer.kernels import CpuPack, Op
from openinfer.recipes.engine import startup
from openinfer.recipes.engine.testing import Planted, Restless, Session
from openinfer.scheduler import Drafter, make_policy
from openinfer.tensor import Checkpoint, float8_e4m3fn

HERE = Path(__file__).parent
FOLDERS = tempfile.TemporaryDirectory()
Body = dict[str, Any]
RESTLESS = "openinfer.recipes.engine.testing.restless:priority"
PAIRS = [pair for pair in itertools.combinations(F.REQUEST, 2) if pair not in F.REFUSED]
ADAPTER = "tuned"
"""The name of the adapter in an engine with the feature "adapters"; half of the requests are for it."""
TIERS = {"host memory", "a disk"}
OTHER_SUMS, NEAR = {"adapters", "several ranks"}, 0.05
"""These add up floats in another order than a plain engine does. A value beside a tie may then get another FP8 code."""
CACHES = {"prefix cache", "KV events", "shared KV", *TIERS}  # these switch the cache on


def parse(text: str) -> Any:
    """A response of /v1/completions, streamed or not, as an Answer."""
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    found: dict[int, Any] = {}
    for part in parts or [json.loads(text)]:
        for piece in part["choices"]:
            choice = found.setdefault(piece["index"], F.Choice())
            choice.text += piece["text"]
            choice.tokens += piece["token_ids"]
            choice.reason = piece["finish_reason"] or choice.reason
            if piece["logprobs"]:
                values, tops = piece["logprobs"]["token_logprobs"], piece["logprobs"]["top_logprobs"]
                known = [(v, top) for v, top in zip(values, tops, strict=True) if v is not None]
                choice.logprobs += [value for value, _ in known]  # the first of a prompt has none
                choice.tops += [top for _, top in known]
            entries = piece.get("prompt_logprobs") or [None]
            choice.of_prompt += [next(iter(entry.values()))["logprob"] for entry in entries[1:]]
    return F.Answer([found[index] for index in sorted(found)], len(parts))


async def ask_all(http: httpx.AsyncClient, bodies: Iterable[Body], at_once: int) -> list[Any]:
    """Answers in the order of the bodies, or the error's message."""
    gate = asyncio.Semaphore(at_once)

    async def one(body: Body) -> Any:
        async with gate:
            answer = await http.post("/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text
        return parse(answer.text) if answer.status_code == 200 else answer.json()["error"]["message"]

    return list(await asyncio.gather(*map(one, bodies)))


def write_v4() -> None:
    """The checkpoints of DeepSeek-V4: without and with a DSpark drafter, and with an MTP layer."""
    model = F.MODELS["deepseek_v4"]
    for path in (model.path, model.others["DSpark drafts"]):
        write_dspark(path)
    shutil.copytree(F.GOLDENS / "deepseek_v4-tiny", model.others["MTP drafts"])
    for path in (model.path, *model.others.values()):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(F.MODELS["qwen3"].path / name, path / name)


write_v4()
write_checkpoint(F.MODELS["deepseek_v3"].path, "deepseek_v32-tiny")

PLAIN_ACTIVATIONS, SAME_SUMS = "plain activations", "batch invariance"
"""Beside FP8: where sums are in another order, some values become other codes. Ranks have other sums in any case."""


def flags_of(names: Sequence[str], model: str = "qwen3") -> Body:
    plain: Body = {"kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False, "max_model_len": 112}
    plain |= F.MODELS[model].flags
    if PLAIN_ACTIVATIONS in names:
        plain["activation_quantization"] = "off"
    if "EAGLE-3 drafts" in names:
        head()
    return functools.reduce(
        lambda flags, name: flags | F.ENGINE[name].kwargs, [n for n in names if n in F.ENGINE], plain
    )


@functools.cache
def head() -> None:
    write_head(Path(F.HEAD.name))


class Helped:
    """A drafter, and one that takes its place where it finds nothing."""

    def __init__(self, own: Drafter, other: Drafter) -> None:
        self.own, self.other = own, other

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        return self.own.propose(tokens, count) or self.other.propose(tokens, count)


def plant(drafting: Drafting, known: Sequence[Sequence[int]]) -> None:
    """Have drafts that are often right, because a method finds few in texts this short: where its drafter finds none,
    and for every second row of layers that draft, whose own are random."""
    make, turns = drafting.make_drafter, itertools.cycle((True, False))
    if make is None:  # a row without a drafter has the layers' drafts
        drafting.make_drafter = lambda: Planted(known) if next(turns) else None
    else:
        drafting.make_drafter = lambda: Helped(make(), Planted(known))


def forgetful(engine: Any) -> Any:
    """The engine, with a pool that evicts each block as soon as no request uses it. So hits come from tiers."""
    step = engine.step

    def forgetting(wait: float) -> Any:
        outputs = step(wait)
        for ledger in engine.pool._ledgers:
            ledger.release(ledger.allocate(ledger.num_free), 0)
        return outputs

    engine.step = forgetting
    return engine


def run(
    model: str,
    rows: int,
    names: Sequence[str],
    bodies: list[Body],
    at_once: int,
    known: Sequence[Sequence[int]] = (),
    **more: Any,
) -> tuple[list[Any], Any]:
    """The answers of an engine with these features in a server without a socket, and the engine, closed. known: prompts
    with their outputs, of which drafts are made, because n-grams find none in texts this short. more: flags."""
    recipe = importlib.import_module(f"openinfer.recipes.{model}").RECIPE
    made, flags, path = [], flags_of(names, model) | more, F.MODELS[model].path_for(names)
    if "adapters" in names:
        flags["lora_modules"] = [f"{ADAPTER}={tuned(model).adapter}"]
    if ADAPTER in names:
        path = tuned(model).merged
        if "FP8 weights" in names:  # the sum of codes and adapter is no code
            path, flags["quantization"] = tuned(model).merged_codes, None
    if "preemption" in names:
        policy, tokens = flags.get("scheduling_policy", "fcfs"), flags.get("max_num_batched_tokens", 512)
        flags["scheduling_policy"] = Restless(make_policy(policy, max_batched_tokens=tokens))

    def build() -> Any:
        engine = startup.build(recipe, path, device="cpu", max_num_seqs=rows, **flags).engine
        if isinstance(engine.runner.drafting, Drafting):
            plant(engine.runner.drafting, known)
            # Whether drafts pay must decide no test.
            most = engine.runner.drafting.max_drafts
            engine.runner.drafting.worth.choose = lambda available, rows, cost: most if available else 0
        made.append(engine)
        return forgetful(engine) if TIERS & set(names) else engine

    async def main() -> list[Any]:
        app = create_app(ThreadDriver(build), tokenizer=F.tokenizer())
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as http,
        ):
            answers = await ask_all(http, bodies, at_once)
            while made[0].pool.num_free < made[0].pool.num_total:  # aborted at a stop string
                await asyncio.sleep(0.001)
            return answers

    answers = asyncio.run(main())
    (engine,) = made
    engine.check()
    assert engine.pool.num_free == engine.pool.num_total, "blocks were not given back"
    return answers, engine


def body_of(model: str, at: int, asked: Body) -> Body:
    prompt = F.MODELS[model].prompts[at % 2]
    return {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **asked}


@dataclass
class Alone:
    """What a plain engine answers, by the prompt's number, to one request at a time. own: features that it has too."""

    model: str
    own: tuple[str, ...]
    plain: list[Any]
    known: dict[tuple[bool, int], Any] = field(default_factory=dict)

    def asked(self, names: Sequence[str], at: int) -> Body:
        plain = self.plain[at % 2]
        return functools.reduce(lambda body, name: body | F.REQUEST[name].body(plain), names, {})

    def pairs(self, which: Iterable[int] = range(len(PAIRS)), *, merged: bool = False) -> list[Any]:
        """Its answers to these of PAIRS, eight at a time, with the first prompt where the pair's number is even. Each
        is asked for once. merged: of an engine with the checkpoint that the adapter is merged into."""
        which = list(which)
        if new := [n for n in which if (merged, n) not in self.known]:
            bodies = [body_of(self.model, n, self.asked(PAIRS[n], n)) for n in new]
            answers, _ = run(self.model, 8, (*[ADAPTER] * merged, *self.own), bodies, 8)
            self.known |= zip([(merged, n) for n in new], answers, strict=True)
        return [self.known[merged, n] for n in which]


@functools.cache
def alone(model: str, own: tuple[str, ...] = ()) -> Alone:
    plain, _ = run(model, 1, own, [body_of(model, at, {}) for at in range(2)], 1)
    return Alone(model, own, plain)


@functools.cache
def singles(model: str) -> dict[tuple[str, int], Any]:
    """What a plain engine answers to a request with a feature, eight at a time, by the prompt's number."""
    found, keys = alone(model), [(name, at) for name in F.REQUEST for at in range(2)]
    answers, _ = run(model, 8, (), [body_of(model, at, found.asked([name], at)) for name, at in keys], 8)
    return dict(zip(keys, answers, strict=True))


class Tuned(NamedTuple):
    """A PEFT folder, and a checkpoint that it is merged into; the same with the values of FP8 weights."""

    adapter: Path
    merged: Path
    merged_codes: Path


def coded(name: str, weight: Any) -> Any:
    """The values of a weight that --quantization fp8 makes, in float32; other tensors as they are."""
    plain = ("in_proj_a.weight", "in_proj_b.weight")
    if "_proj" not in name or not name.endswith(".weight") or name.endswith(plain):
        return weight
    scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(448)
    return (weight / scales).astype(float8_e4m3fn).astype(np.float32) * scales


@functools.cache
def tuned(model: str) -> Tuned:
    """An adapter of all projections of a model. Its folders go when the process ends."""
    folder = Path(FOLDERS.name) / model
    source = F.MODELS[model].path
    with Checkpoint(source) as checkpoint:
        weights = {name: checkpoint.array(name).astype(np.float32) for name in checkpoint.names}
    codes = {name: coded(name, weight) for name, weight in weights.items()}
    rng, tensors = np.random.default_rng(5), {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and not name.startswith("mtp."):
            a = rng.standard_normal((8, weight.shape[1])).astype(np.float32) / weight.shape[1] ** 0.5
            b = rng.standard_normal((len(weight), 8)).astype(np.float32) * (
                0.3 * weight.std() * weight.shape[1] ** 0.5
            )
            tensors |= {f"base_model.model.{module}.lora_{n}.weight": m for n, m in (("A", a), ("B", b))}
            weights[name], codes[name] = weight + b @ a, codes[name] + b @ a
    made = Tuned(folder / "adapter", folder / "merged", folder / "merged_codes")
    made.adapter.mkdir(parents=True)
    save_file(tensors, made.adapter / "adapter_model.safetensors")
    names = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": names}
    (made.adapter / "adapter_config.json").write_text(json.dumps(config))
    for path, merged_weights in ((made.merged, weights), (made.merged_codes, codes)):
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(merged_weights, path / "model.safetensors")
    return made


def same(one: Any, other: Any, near: float = 1e-4) -> bool:
    """The same answer, but for the sizes of its chunks. near: how near log-probabilities are."""
    assert isinstance(one, F.Answer), one
    return len(one.choices) == len(other.choices) and all(
        (a.tokens, a.text, a.reason) == (b.tokens, b.text, b.reason)
        and a.logprobs == pytest.approx(b.logprobs, abs=near)
        and a.of_prompt == pytest.approx(b.of_prompt, abs=near)
        for a, b in zip(one.choices, other.choices, strict=True)
    )


TODAY = datetime.date.today().toordinal()
SHOWN = [
    pytest.param(range(TODAY % 3, len(PAIRS), 3), id="of the day"),
    pytest.param(range(len(PAIRS)), id="all", marks=pytest.mark.slow),
]
"""What is asked of engines in tests where a third of PAIRS, by the day, shows nearly as much."""


@pytest.mark.parametrize("model", F.MODELS)
def test_each_alone_does_what_it_says_and_nothing_else(model: str) -> None:
    found = alone(model)
    for name, feature in F.REQUEST.items():
        differs = []
        for at, plain in enumerate(found.plain):
            answer, asked = singles(model)[name, at], found.asked([name], at)
            assert F.holds(name, answer, plain, F.MODELS[model].prompts[at], asked), (name, answer)
            before = plain.first.tokens, plain.first.reason
            differs.append((answer.first.tokens, answer.first.reason) != before)
        if name != "a least length":  # no model ends so soon here
            assert any(differs) != feature.passive, name


@pytest.mark.parametrize("mine", SHOWN)
@pytest.mark.parametrize("model", F.MODELS)
def test_two_asked_for_at_once_keep_both_promises(model: str, mine: range) -> None:
    found = alone(model)
    for n, answer in zip(mine, found.pairs(mine), strict=True):
        pair, at, asked = PAIRS[n], n % 2, found.asked(PAIRS[n], n)
        for name, other in (pair, pair[::-1]):
            kept = F.holds(name, answer, found.plain[at], F.MODELS[model].prompts[at], asked)
            assert kept, (pair, name, answer)
            if F.REQUEST[name].passive:
                assert answer.first.tokens == singles(model)[other, at].first.tokens, pair


SHARE = 13
"""Two flags meet every thirteenth of the PAIRS; in its several companies a flag meets all that can be asked."""

CASES = [(model, turn, names) for model in F.MODELS for turn, names in enumerate(F.pairs_of(model))]


def test_every_flag_meets_everything_that_can_be_asked() -> None:
    met = {
        (model, flag, asked)
        for model, turn, names in CASES
        for n in range(-turn % SHARE, len(PAIRS), SHARE)
        for flag in names
        for asked in PAIRS[n]
    }
    for model in F.MODELS:
        assert met >= {(model, *pair) for pair in itertools.product(F.engine_of(model), F.REQUEST)}


def cases() -> Iterator[Any]:
    """CASES. In those of the day a flag of a model meets at most one other, by the sum of their places in the list; the
    others are slow. On some days a flag meets none, because its partner is refused or missing, or is the flag."""
    places = list(F.ENGINE)
    for model, turn, names in CASES:
        of_the_day = (sum(map(places.index, names)) - TODAY) % len(places) == 0
        marks = () if of_the_day else pytest.mark.slow
        yield pytest.param(model, turn, names, id="-".join((model, *names)), marks=marks)


@pytest.mark.parametrize(("model", "turn", "names"), [*cases()])
def test_two_flags_of_an_engine_change_no_token(
    model: str, turn: int, names: tuple[str, ...], late: None
) -> None:
    own = tuple(name for name in names if name in F.OWN)
    if own and not OTHER_SUMS & set(names):
        own, names = (*own, SAME_SUMS), (*(name for name in names if name != SAME_SUMS), SAME_SUMS)
    elif "FP8 weights" in names:
        own, names = (*own, PLAIN_ACTIVATIONS), (*names, PLAIN_ACTIVATIONS)
    found = alone(model, own)
    mine = range(-turn % SHARE, len(PAIRS), SHARE)
    bodies = [body_of(model, n, found.asked(PAIRS[n], n)) for n in mine]
    if "priorities" in names:
        bodies = [{**body, "priority": at % 3 - 1} for at, body in enumerate(bodies)]
    right = found.pairs(mine)
    wanted = right
    if "adapters" in names:
        bodies = [one for body in bodies for one in (body, {**body, "model": ADAPTER})]
        wanted = [one for both in zip(right, found.pairs(mine, merged=True), strict=True) for one in both]
    known = [
        F.tokenizer().encode_short(F.MODELS[model].prompts[n % 2]) + choice.tokens
        for n, answer in zip(mine, right, strict=True)
        for choice in answer.choices
    ]
    answers, engine = run(model, 8, names, bodies, 5, known)
    near = NEAR if OTHER_SUMS & set(names) and own else 1e-4
    for body, answer, right in zip(bodies, answers, wanted, strict=True):
        assert same(answer, right, near), (body, answer, right)
    stats = engine.stats()
    assert (stats.preemptions > 0) == ("preemption" in names)
    assert (stats.accepted_draft_tokens > 0) == bool(F.METHODS.keys() & set(names))
    used = sum(stats.offload_blocks.values())  # on a disk all may be there already, from an engine before
    assert (used > 0) == bool(TIERS & set(names))
    assert (stats.prefix_hit_tokens > 0) == bool(CACHES & set(names))


OF_TODAY = () if TODAY % 4 == 0 else pytest.mark.slow


@pytest.mark.parametrize(
    "model", [pytest.param("qwen3", marks=OF_TODAY)]
)  # no other golden has heads for four
def test_four_ranks_change_no_token(model: str, late: None) -> None:
    """A sixth of what can be asked, of ranks of which two have the same key head."""
    found, mine = alone(model), range(TODAY % 6, len(PAIRS), 6)
    bodies = [body_of(model, n, found.asked(PAIRS[n], n)) for n in mine]
    names = ("several ranks", "prefix cache", "chunked prefill", "preemption")
    answers, engine = run(model, 8, names, bodies, 5, tensor_parallel_size=4)
    for body, answer, right in zip(bodies, answers, found.pairs(mine), strict=True):
        assert same(answer, right), (body, answer, right)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model in F.MODELS for name in F.engine_of(model) if name != "shared KV"],
)
def test_blocks_of_a_peer_change_no_token(model: str, name: str) -> None:
    """An engine that forgets its blocks at once asks another one with the same flags, which has them in its host
    memory."""
    plainly = (name, SAME_SUMS) if name in F.OWN else ()
    found, mine, names = alone(model, plainly), range(0, len(PAIRS), SHARE), (name, "shared KV", *plainly[1:])
    bodies = [body_of(model, n, found.asked(PAIRS[n], n)) for n in mine]
    wanted = found.pairs(mine, merged=name == "adapters")
    if name == "adapters":
        bodies = [{**body, "model": ADAPTER} for body in bodies]
    flags = flags_of(names, model) | {"kv_offload_gb": 0.05, "max_num_seqs": 8}
    if name == "adapters":
        flags["lora_modules"] = [f"{ADAPTER}={tuned(model).adapter}"]
    if name == "a disk":
        flags["kv_offload_dir"] = tempfile.mkdtemp(dir=FOLDERS.name)
    own = {"kv_offload_dir": tempfile.mkdtemp(dir=FOLDERS.name)} if name == "a disk" else {}
    flags.pop("kv_peer")
    recipe = importlib.import_module(f"openinfer.recipes.{model}").RECIPE
    path = F.MODELS[model].path_for(names)
    donor = startup.build(recipe, path, device="cpu", **flags).engine
    try:
        session = Session(forgetful(donor))
        for prompt in F.MODELS[model].prompts:
            session.submit(
                F.tokenizer().encode_short(prompt), 2, adapter=ADAPTER if name == "adapters" else ""
            )
        session.finish()
        session.step()
        donor._transfers._tiers.settle()
        host, port = donor._transfers._tiers.sharing.address
        answers, engine = run(model, 8, names, bodies, 5, kv_peer=[f"{host}:{port}"], **own)
    finally:
        donor.close()
    for body, answer, right in zip(bodies, answers, wanted, strict=True):
        assert same(answer, right), (body, answer, right)
    assert engine.stats().offload_blocks["from_peer"] > 0


class WarmSlot:
    """A pack that samples slot 3 with a high temperature."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def bind(self, op: Op[Any], args: Any) -> Callable[[], None]:
        return functools.partial(self.run, op, args)

    def run(self, op: Op[Any], args: Any) -> None:
        if op.name == "sample":
            args.temperatures.numpy()[3] = 5.0
        self.inner.run(op, args)


def test_one_row_that_is_drawn_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = alone("qwen3")
    mine = range(0, len(PAIRS), SHARE)
    bodies, wanted = [body_of("qwen3", n, found.asked(PAIRS[n], n)) for n in mine], found.pairs(mine)
    monkeypatch.setattr(startup, "CpuPack", lambda communicator, **way: WarmSlot(CpuPack(**way)))
    answers, _ = run("qwen3", 8, (), bodies, 5)
    assert not all(same(answer, right) for answer, right in zip(answers, wanted, strict=True))


@pytest.mark.parametrize("mine", SHOWN)
def test_an_adapter_changes_tokens(mine: range) -> None:
    """So an engine that left it out would be seen."""
    for model in (name for name in F.MODELS if (name, "adapters") not in F.LACKING):
        pairs = zip(alone(model).pairs(mine), alone(model).pairs(mine, merged=True), strict=True)
        assert sum(not same(one, other) for one, other in pairs) > len(mine) // 2


@pytest.mark.parametrize("mine", SHOWN)
@pytest.mark.parametrize("own", F.OWN)
def test_a_feature_with_tokens_of_its_own_has_them(own: str, mine: range) -> None:
    """So an engine that left it out would be seen, also where log-probabilities need not be as near."""
    pairs = zip(alone("qwen3").pairs(mine), alone("qwen3", (own,)).pairs(mine), strict=True)
    assert sum(not same(one, other, NEAR) for one, other in pairs) > len(mine) // 8


SERVERS = {
    "processes": ("several HTTP processes", "an engine that comes back"),
    "thread": ("the engine in a thread",),
    "replicas": ("replicas",),
}
WITHOUT = {"ranks": {*F.OWN}, "one rank": {"several ranks"}}


def servers() -> Iterator[Any]:
    """Model, features of the server, features that the engine lacks, and how many PAIRS there are for one that is asked
    for. One is of the day, with every seventh of PAIRS; all with every third are slow."""
    every = [*itertools.product(F.MODELS, SERVERS.items(), WITHOUT.items())]
    for number, (model, (kind, features), (name, without)) in enumerate(every):
        if (number - 7 * TODAY) % len(every) == 0:  # another model on the next day
            yield pytest.param(model, features, without, 7, id=f"{name}-{kind}-{model}-of the day")
        yield pytest.param(model, features, without, 3, id=f"{name}-{kind}-{model}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "features", "without", "share"), [*servers()])
def test_a_server_with_every_flag_changes_no_token(
    model: str,
    features: tuple[str, ...],
    without: set[str],
    share: int,
    server: Callable[..., Any],
    tmp_path: Path,
) -> None:
    flags = ["--max-num-seqs", "8", *server_flags(features)]
    alien = {name for pair in F.REFUSED for name in pair if set(features) & set(pair)}
    names = [name for name in F.engine_of(model) if name not in without | alien]
    methods = [name for name in names if name in F.METHODS]
    spare = {name for at, name in enumerate(methods) if (at + share + TODAY) % len(methods)}
    names = [name for name in names if name not in spare]
    if OTHER_SUMS & set(names) and "FP8 weights" in names:
        names.append(PLAIN_ACTIVATIONS)
    plainly = tuple(name for name in names if name in {*F.OWN, PLAIN_ACTIVATIONS})
    found = alone(model, plainly)
    own = {"scheduling_policy": RESTLESS}
    if TIERS & set(names):
        own["kv_offload_dir"] = str(tmp_path)  # the servers of other tests still run
    if "adapters" in names:
        own["lora_modules"] = f"{ADAPTER}={tuned(model).adapter}"
    flags += engine_flags({**flags_of(names, model), **own})
    one = server(F.MODELS[model].path_for(names), *flags)
    mine = range((len(features) + TODAY) % share, len(PAIRS), share)
    bodies = [{**body_of(model, n, found.asked(PAIRS[n], n)), "priority": n % 2} for n in mine]
    wanted = found.pairs(mine)
    if "adapters" in names:
        bodies += [{**body, "model": ADAPTER} for body in bodies]
        wanted += found.pairs(mine, merged=True)

    async def main() -> list[Any]:
        async with httpx.AsyncClient(base_url=one.url, timeout=60) as http:
            return await ask_all(http, bodies, 40)

    for body, answer, right in zip(bodies, asyncio.run(main()), wanted, strict=True):
        assert same(answer, right, NEAR if plainly else 1e-4), (body, answer, right)
    assert set(one.settled().values()) == {0.0}
    preempted = re.search(
        r"^vllm:num_preemptions_total\{.*\} (\S+)", httpx.get(f"{one.url}/metrics").text, re.M
    )
    assert preempted is not None
    assert float(preempted[1]) > 0
    assert one.stop() == 0


def engine_flags(kwargs: Body) -> list[str]:
    """Keyword arguments of an engine as words of a command line."""
    words = []
    for name, value in kwargs.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}" if value is False else f"--{flag}"]
        words += [] if isinstance(value, bool) else value if isinstance(value, list) else [str(value)]
    return words


def server_flags(features: Iterable[str]) -> list[str]:
    """The flags of features of a server or an engine."""
    return [
        word
        for feature in features
        for word in (
            F.SERVER[feature].how.strip("`").split()
            if feature in F.SERVER
            else engine_flags(F.ENGINE[feature].kwargs)
        )
    ]


@pytest.mark.parametrize(("one", "other"), F.REFUSED)
def test_what_cannot_be_together_is_refused_by_name(one: str, other: str, main: Callable[..., Any]) -> None:
    if one in F.REQUEST:
        body = body_of("qwen3", 0, alone("qwen3").asked((one, other), 0))
        (message,), _ = run("qwen3", 1, (), [body], 1)
    else:
        flags = flags_of([name for name in (one, other) if name in F.ENGINE])
        servers = server_flags([name for name in (one, other) if name in F.SERVER])
        message = refusal(main, "qwen3", [*engine_flags(flags), *servers])
    assert F.REFUSED[one, other] in message


@pytest.mark.parametrize(("model", "name"), F.LACKING)
def test_what_a_model_does_not_have_is_refused_by_name(
    model: str, name: str, main: Callable[..., Any]
) -> None:
    assert F.LACKING[model, name] in refusal(main, model, engine_flags(flags_of([name], model)))


def refusal(main: Callable[..., tuple[int, str]], model: str, flags: list[str]) -> str:
    """The last line of a server that does not start."""
    code, said = main("serve", str(F.MODELS[model].path), "--device", "cpu", "--port", "0", *flags)
    assert code in (1, 2), said
    return said.splitlines()[-1]


def test_the_table_in_the_documents_is_that_of_the_lists() -> None:
    assert F.table_in((F.ROOT / "docs/features.md").read_text()) == F.table()
