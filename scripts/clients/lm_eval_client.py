"""lm-eval: its models for completions and chats, the server's own tokenizer, log-likelihoods and generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval

QUESTIONS = [{"q": f"What is {n} + {n}?", "choices": [str(2 * n), str(n)], "answer": 0} for n in range(1, 5)]


def tasks(kind: str) -> list[dict[str, Any]]:
    """A task of our own, for data sets are not to be had here."""
    path = Path("questions.jsonl").resolve()
    path.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    task: dict[str, Any] = {
        "task": f"sums_{kind}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "output_type": kind,
    }
    if kind == "multiple_choice":
        return [
            task | {"doc_to_choice": "choices", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}]}
        ]
    target = {"doc_to_target": "{{choices[answer]}}", "metric_list": [{"metric": "exact_match"}]}
    return [task | target | {"generation_kwargs": {"until": ["\n", "Q:"], "max_gen_toks": 8}}]


def evaluate(model: str, url: str, kind: str, **options: Any) -> Any:
    arguments = {
        "model": "qwen3-tiny",
        "base_url": url,
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 512,
        "tokenizer_backend": "remote",
        **options,
    }
    return lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=tasks(kind), bootstrap_iters=0)


def check_log_likelihoods(real: str, speaker: str) -> None:
    found = evaluate("local-completions", f"{real}/v1/completions", "multiple_choice")
    assert 0 <= found["results"]["sums_multiple_choice"]["acc,none"] <= 1
    assert len(found["samples"]["sums_multiple_choice"]) == len(QUESTIONS)


def check_generations(real: str, speaker: str) -> None:
    found = evaluate("local-completions", f"{real}/v1/completions", "generate_until")
    assert len(found["samples"]["sums_generate_until"]) == len(QUESTIONS)


def check_chats(real: str, speaker: str) -> None:
    options = {"tokenizer_backend": None, "tokenized_requests": False}
    arguments = {
        "model": "qwen3-tiny",
        "base_url": f"{real}/v1/chat/completions",
        "max_retries": 1,
        **options,
    }
    found = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=arguments,
        tasks=tasks("generate_until"),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert len(found["samples"]["sums_generate_until"]) == len(QUESTIONS)
