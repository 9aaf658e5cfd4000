"""vLLM's benchmark client, without the rest of vLLM: completions, chats and responses; no request fails."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm.benchmarks.serve import add_cli_args, main

TOKENIZER = Path(__file__).parents[2] / "demo" / "qwen3"
LOAD = """--dataset-name random --random-input-len 24 --random-output-len 8 --num-prompts 12 --max-concurrency 4
    --ignore-eos --disable-tqdm --num-warmups 1"""


def bench(url: str, backend: str, path: str, *options: str) -> Any:
    """The figures that vLLM's client measured."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    where = ["--model", "qwen3", "--tokenizer", str(TOKENIZER), "--base-url", url, "--endpoint", path]
    found = main(parser.parse_args([*where, "--backend", backend, *LOAD.split(), *options]))
    assert (found["completed"], found["failed"]) == (12, 0), json.dumps(found)[:2000]
    return found


def check_completions(demo: str) -> None:
    assert bench(demo, "openai", "/v1/completions")["total_output_tokens"] == 96
    bench(
        demo, "openai", "/v1/completions", "--request-rate", "20", "--temperature", "0.5", "--logprobs", "2"
    )


def check_chats(demo: str) -> None:
    found = bench(demo, "openai-chat", "/v1/chat/completions", "--percentile-metrics", "ttft,tpot,itl,e2el")
    assert found["total_output_tokens"] == 96


def check_responses(demo: str) -> None:
    bench(demo, "openai-responses", "/v1/responses")
