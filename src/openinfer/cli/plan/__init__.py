"""`openinfer plan MODEL --rate 4:64`: latency, throughput and memory of a server over load, before there is a server.

It needs no GPU and no weights: MODEL is a folder with config.json, or the name of a published model. The engine's own
scheduler and pool run in virtual time. A step takes what its ops cost at the speeds that were measured on the GPU.
"""

import argparse
import functools
import math
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from openinfer.cli import recipe_flags, recipes
from openinfer.cli.bench.record import add_record_arguments, progress, record, write
from openinfer.cli.bench.serve import OfferedLoad
from openinfer.cli.plan import text, tiers
from openinfer.cli.plan.compare import Objectives, Variant, alternatives, choice
from openinfer.cli.plan.load import Agents, PlannedServer, Point
from openinfer.cli.recipe_flags import Asked, BadFlags
from openinfer.cli.tune import speed
from openinfer.recipes.engine.offload import check_offload

SECONDS = 15.0
"""Seconds of arrivals at each load, with at least FEWEST requests and at most MOST."""
FEWEST, MOST = 100, 1000
HOPELESS = 1.25
"""Rates above this part of what a compared server completes are not tried: its queue would only grow."""
HALVINGS = 3
"""Rates tried between the largest load that keeps the objectives and the next."""


def main(argv: list[str]) -> int:
    """Print; returns 0, 1 for what cannot be planned, 2 for wrong arguments."""
    body = functools.partial(_plan, argv)
    return recipe_flags.run_command(argv, "plan", __doc__, _flags, body, named=True)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpu", default="H200", metavar="NAME",
        help="H200, or CPU with the --speeds that were measured on it; default: %(default)s")  # fmt: skip
    sharing = "GPUs that share the model; default: --tensor-parallel-size"
    add("--gpus", "--ranks", type=int, metavar="N", help=sharing)  # `explain` says ranks
    add("--input", type=int, default=1024, metavar="N", help="tokens of a prompt; default: %(default)s")
    add("--output", type=int, default=128, metavar="N", help="tokens of an answer; default: %(default)s")
    add("--rate", type=rates, default="4:64", metavar="LOW:HIGH",
        help="requests a second, each load twice the one before; or as 4,16,32; default: %(default)s")  # fmt: skip
    add("--ttft-ms", type=above_zero, metavar="MS", help="objective: 99 of 100 first tokens come within it")
    add("--tpot-ms", type=above_zero, metavar="MS", help="objective: the same for the time of a later token")
    add("--acceptance", type=float, metavar="A",
        help="with --speculative-config: the chance that a draft is accepted where those before it were, as "
        "vllm:spec_decode_num_accepted_tokens_per_pos says of a text")  # fmt: skip
    add("--compare", type=words, action="append", default=[], metavar="FLAGS",
        help="the same loads with other flags too, or another model: --compare 'qwen3_5-4B --max-num-seqs 64'; may be "
        "repeated; default: other step sizes and a paced policy")  # fmt: skip
    add("--speeds", type=Path, metavar="FILE",
        help="speeds that `openinfer tune --from-trace` fitted; default: those that the GPU is known by")  # fmt: skip
    add("--turns", type=int, default=1, metavar="N",
        help="agents: each of N prompts is all that was said, and --input tokens more; default: 1")  # fmt: skip
    add("--system", type=int, default=2048, metavar="N",
        help="with --turns: tokens that all agents begin with; default: %(default)s")  # fmt: skip
    add("--think-s", type=float, default=5.0, metavar="S",
        help="with --turns: mean seconds between an answer and the next prompt; default: %(default)s")  # fmt: skip
    tiers.flags(parser)
    add("--seed", type=int, default=0, help="seed of the arrivals; default: %(default)s")
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves into it; needs openinfer-cli[plot]")
    add_record_arguments(parser)


def _plan(argv: list[str], args: argparse.Namespace, asked: Asked) -> int:
    if args.plot:
        recipe_flags.figure_type()  # what is missing is said before the work
    begun = time.perf_counter()
    progress(f"the steps of {asked.model_dir.name}")
    objectives = Objectives(args.ttft_ms, args.tpot_ms)
    server, others = _server(args, asked), [_other(argv, flags) for flags in args.compare]
    load = f"load: prompts of {args.input} tokens, answers of {args.output}, {args.turns} a chat"
    print(f"{text.title(server)}\n{load}\n{text.memory_lines(server)}\n{text.HEAD}", flush=True)
    points: list[Point] = []
    for point in _points(server, args, objectives):
        points.append(point)
        print(text.row(point, points[0].requests_per_s), flush=True)
    first = Variant("as asked", server, points)
    if not args.compare:
        others = [_other(argv, shlex.split(flags)) for flags in alternatives(first, args)]
    variants = [first]
    for flags, own, compared in others:
        progress(flags)
        variants.append(Variant(flags, compared, list(_points(compared, own, objectives, most=HOPELESS))))
    knee, best = first.knee, choice(variants, objectives)
    print(text.verdict(first, objectives))
    print(text.comparison(variants, objectives))
    print(text.advice(first, best, objectives, _of_server(best.flags) if best is not first else []))
    if any(one.server.gpus > 1 for one in variants):
        print(
            "(several GPUs: a server was measured with V4-Flash on two, else steps; docs/planning.md has the errors)"
        )
    if args.plot:
        text.plot_latencies(variants, args.plot)
    if args.json:
        results = [one.as_dict(objectives) for one in variants]
        facts = {
            "model": first.server.asked.model_dir.name,
            "planned_gpu": first.server.outline.target.gpu,
            "nvrtc": first.server.outline.target.nvrtc,
            "gpus": first.server.gpus,
            "chosen": best.flags,
        }
        write(args.json, record("plan", args, results, knee=knee.load.request_rate, **facts))
    progress(f"{sum(len(one.points) for one in variants)} loads in {time.perf_counter() - begun:.1f} s")
    return 0


def _server(args: argparse.Namespace, asked: Asked) -> PlannedServer:
    target = speed.target(args.gpu)
    if target is speed.CPU and args.speeds is None:
        raise BadFlags(
            "--gpu CPU needs --speeds: no CPU's speed is known; `openinfer tune MODEL --gpu CPU --from-trace FILE` "
            "fits it"
        )
    named = asked.options.tensor_parallel_size
    gpus = named if args.gpus is None else args.gpus
    if gpus < 1 or named not in (1, gpus):
        raise BadFlags(
            f"--gpus {gpus}: a model is on at least one GPU, and --tensor-parallel-size is {named}"
        )
    acceptance = 0.0 if args.acceptance is None else args.acceptance
    if (asked.options.speculative_config is None) != (args.acceptance is None) or not 0 <= acceptance <= 1:
        raise BadFlags(
            "--speculative-config and --acceptance need each other: a plan does not know how many drafts a text "
            "accepts; give a chance from 0 to 1"
        )
    figures = speed.target_figures(target)
    if args.speeds:
        figures = speed.load_figures(args.speeds, target, figures)
    speeds, agents = tiers.speeds(args), None
    check_offload(asked.options)
    if args.turns < 1 or args.system < 0 or args.think_s < 0:
        raise BadFlags(
            f"--turns {args.turns} --system {args.system} --think-s {args.think_s:g}: at least one turn, and no number "
            "below 0"
        )
    if args.turns > 1:
        agents = Agents(args.turns, args.system, args.think_s, speeds)
    elif asked.options.kv_offload_gb or asked.options.kv_offload_disk_gb:
        raise BadFlags("tiers keep prefixes, and these prompts share none; give --turns too")
    server = PlannedServer(asked, target, figures, gpus, acceptance, agents)
    server.policy()  # an unknown one is said before the work
    longest = args.turns * (args.input + args.output) + (args.system if agents else 0)
    if args.input < 1 or args.output < 2 or longest > server.max_model_len:
        raise BadFlags(
            f"--input {args.input} --output {args.output} --turns {args.turns}: at least 1 and 2, and together at most "
            f"{server.max_model_len} tokens (--max-model-len, and the cache); a prompt has up to {longest}"
        )
    return server


def _other(argv: list[str], words: list[str]) -> tuple[str, argparse.Namespace, PlannedServer]:
    """Flags, arguments and server of a `--compare`: of these flags besides the command line's, or of their model."""
    flags, parser = shlex.join(words), recipe_flags.merged_parser("plan", __doc__, _flags)
    model, rest = recipes.model_and_rest(parser, argv)
    if not words[0].startswith("-"):
        model, *words = words
    args, asked = recipe_flags.parse([model, *rest, *words], "plan", __doc__, _flags, named=True)
    return flags, args, _server(args, asked)


def _of_server(flags: str) -> list[str]:
    """The flags of a `--compare` that `openinfer serve` takes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _flags(parser)
    found = parser.parse_known_args(shlex.split(flags))[1]
    return found if not found or found[0].startswith("-") else found[1:]


def _points(
    server: PlannedServer, args: argparse.Namespace, objectives: Objectives, most: float = math.inf
) -> Iterator[Point]:
    """All at once, one request at a time, and the rates. With objectives, also rates between the largest that keeps
    them and the next, to find the largest. most: rates but the first are left out above this part of what the server
    completes, except for agents, whose offered rate is not what comes."""
    size, rows = (args.input, args.output), server.asked.options.max_num_seqs
    yield (rush := server.serve(OfferedLoad(math.inf, min(MOST, 5 * rows // 2), 0, *size, args.seed)))
    yield server.serve(OfferedLoad(math.inf, 5, 1, *size, args.seed))

    def at(rate: float) -> Point:
        count = min(MOST, max(FEWEST, round(rate * SECONDS)))
        return server.serve(OfferedLoad(rate, count, 0, *size, args.seed + 1))

    kept, broken = 0.0, math.inf
    for rate in args.rate:
        if rate > max(args.rate[0], most * rush.requests_per_s) and server.agents is None:
            broken = min(broken, rate)
            break
        yield (point := at(rate))
        if broken == math.inf and objectives.met(point):
            kept = rate
        else:
            broken = min(broken, rate)
    if not objectives or not kept or broken == math.inf:
        return
    for _ in range(HALVINGS):
        middle = (kept + broken) / 2
        yield (point := at(middle))
        kept, broken = (middle, broken) if objectives.met(point) else (kept, middle)


def above_zero(text: str) -> float:
    """A number of `--ttft-ms` or `--tpot-ms`. Raises ArgumentTypeError."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time above 0")
    return number


def words(text: str) -> list[str]:
    """The words of `--compare`. Raises ArgumentTypeError."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into flags: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError("it is empty; give flags, or the name of another model")
    return found


def rates(text: str) -> list[float]:
    """Requests a second of `--rate`. Raises ArgumentTypeError."""
    low, colon, high = text.partition(":")
    try:
        if not colon:
            found = [float(part) for part in text.split(",")]
        else:
            found, last = [float(low)], float(high)
            if last < found[0]:
                raise ValueError
            while 0 < found[-1] < last:
                found.append(min(2 * found[-1], last))
    except ValueError:
        found = []
    if not found or not all(0 < rate < math.inf for rate in found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LOW:HIGH or a list such as 4,16,32, in requests a second above 0"
        )
    return sorted(set(found))
