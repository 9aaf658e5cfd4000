"""`openinfer bench eval`: the share of a file's questions that a model answers right, by exact checks.

    openinfer bench eval demo/qwen3
    openinfer bench eval http://127.0.0.1:8000 --cases demo/eval.jsonl

A checkpoint is served for the time of the run; a URL names a server that runs. Answers are greedy. The file's format is
in openinfer.cli.bench.eval_cases; without --cases it is eval.jsonl beside the checkpoint's folder.
"""

import argparse
import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openinfer.cli import recipes
from openinfer.cli.api import Api, ApiError, add_api_key, api_key
from openinfer.cli.bench import eval_cases
from openinfer.cli.bench.record import add_record_arguments, progress, record, write
from openinfer.cli.bench.server import NotReady, serving
from openinfer.frontend.errors import FlagError
from openinfer.frontend.flag_parser import FlagParser
from openinfer.tensor import ProgressBar

PROG = "openinfer bench eval"


def main(argv: list[str]) -> int:
    """Ask all questions. Returns 0; 1 if a request failed or --at-least was missed; 2 for wrong arguments."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    args = parser.parse_args(argv[:at])
    server_flags = argv[at + 1 :]
    is_url = "://" in args.model
    folder = None if is_url else recipes.checkpoint(args.model)
    if is_url and server_flags:
        parser.error(f"flags after -- are the server's, and {args.model} runs already: {server_flags}")
    if folder is None and args.cases is None:
        parser.error("give --cases FILE with a URL")
    try:
        cases = eval_cases.load_cases(args.cases or (folder or Path()).resolve().parent / "eval.jsonl")
        cases = [case for case in cases if not args.kinds or case.kind in args.kinds]
        if not cases:
            raise eval_cases.CaseError(f"no case is of the kinds {', '.join(args.kinds)}")
        with contextlib.ExitStack() as stack:
            url = args.model
            if folder is not None:
                progress(f"starting a server of {folder}")
                server = stack.enter_context(serving(folder, server_flags))
                url = server.url
                progress(f"ready in {server.ready_s:.2f} s")
            result = _run(Api(url, api_key(args)), cases, args)
    except (eval_cases.CaseError, ApiError, FlagError, NotReady, OSError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    _print(result, args.wrong)
    if args.json:
        write(args.json, record("eval", args, [result]))
    share: float = result["scores"]["all"]["share"]
    return 0 if share >= args.at_least else 1


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        PROG, usage=f"{PROG} (MODEL_DIR | URL) [flags] [-- SERVER FLAGS]", description=__doc__
    )
    add = parser.add_argument
    add("model", metavar="MODEL_DIR | URL", help="checkpoint to serve, or the URL of a running server")
    add("--cases", type=Path, metavar="FILE", help="JSON lines of chats and checks")
    add("--kinds", nargs="+", default=[], metavar="KIND", help="only cases of these kinds")
    add("--max-concurrency", type=int, default=8, metavar="N", help="requests at once; default: 8")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens of an answer at most; default: 256")
    add("--at-least", type=float, default=0.0, metavar="SHARE", help="exit with 1 below this share of cases")
    add("--wrong", type=int, default=0, metavar="N", help="print the first N wrong answers")
    add_api_key(parser)
    add_record_arguments(parser)
    return parser


def _run(api: Api, cases: list[eval_cases.EvalCase], args: argparse.Namespace) -> dict[str, Any]:
    model, began = api.first_model().id, time.perf_counter()

    def ask(case: eval_cases.EvalCase) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model, "messages": case.messages, "temperature": 0, "max_tokens": args.max_tokens,
            "chat_template_kwargs": {"enable_thinking": case.thinking},
        }  # fmt: skip
        return api.chat({**body, "tools": case.tools} if case.tools else body)

    bar, answers = ProgressBar("openinfer:", things="answers"), []
    with ThreadPoolExecutor(args.max_concurrency) as pool:
        for answer in pool.map(ask, cases):
            answers.append(answer)
            bar(len(answers), len(cases))
    seconds = time.perf_counter() - began
    outcomes, wrong = [], []
    for case, answer in zip(cases, answers, strict=True):
        message = answer["choices"][0]["message"]
        called = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(one["name"], one["arguments"]) for one in called]
        right = eval_cases.passed(case.check, message.get("content") or "", calls)
        outcomes.append((case.kind, right))
        if not right:
            asked = case.messages[-1]["content"]
            wrong.append({"kind": case.kind, "asked": asked, "check": case.check, "answer": message})
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    shares = {
        kind: {"right": right, "cases": count, "share": round(right / count, 4)}
        for kind, (right, count) in eval_cases.scores(outcomes).items()
    }
    return {
        "model": model, "scores": shares, "seconds": round(seconds, 2), "output_tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1), "wrong": wrong,
    }  # fmt: skip


def _print(result: dict[str, Any], wrong: int) -> None:
    for kind, score in result["scores"].items():
        print(f"{kind:<16} {score['right']:>4} of {score['cases']:<4} {score['share']:>7.1%}")
    print(f"{result['output_tokens']} tokens in {result['seconds']} s, {result['tokens_per_s']} tokens/s")
    for one in result["wrong"][:wrong]:
        print(f"\n{one['kind']}: {one['asked']}\n  wanted {one['check']}\n  got    {one['answer']}")
