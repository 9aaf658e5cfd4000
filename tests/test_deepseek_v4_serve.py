"""The DeepSeek-V4 recipe behind `openinfer serve`, over a real socket; config.json chooses recipe and chat format."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_streams import (
    TOOL,
    body,
    check_greedy_tokens,
    check_schema_and_logprobs,
    check_streams,
    mixed,
    prompts_that_begin_alike,
)

from openinfer.frontend.chat import DeepSeekV4Renderer

TINY = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"
SMALL = ("--max-num-seqs", "9", "--max-num-batched-tokens", "96")
"""The flags of one server that several tests share."""


def test_greedy_tokens_are_the_goldens(deepseek: Any, start: Callable[..., Any]) -> None:
    check_greedy_tokens(start(deepseek.path, "--activation-quantization", "off").url, deepseek)


@pytest.fixture(scope="module")
def as_published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as its authors publish it: without a Jinja template."""
    folder = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_chats_are_rendered_by_code_and_read_in_this_familys_format(
    as_published: Path, start: Callable[..., Any]
) -> None:
    facts = json.loads((TINY / "golden.json").read_text())
    cases = [c for c in facts["chat_cases"] if c["add_generation_prompt"]]
    with httpx.Client(base_url=start(as_published).url, timeout=60) as client:
        for case in cases:
            thinking = case["enable_thinking"]
            request = {
                "messages": case["messages"],
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "chat_template_kwargs": {} if thinking is None else {"thinking": thinking},
            }
            text = DeepSeekV4Renderer().render(case["messages"], kwargs=request["chat_template_kwargs"])
            assert text == case["text"]
            chat = client.post("/v1/chat/completions", json=request).json()
            assert chat["usage"]["prompt_tokens"] == len(case["ids"])
            message = chat["choices"][0]["message"]
            assert bool(message.get("reasoning")) == bool(thinking)
            assert bool(message["content"]) == (not thinking)
        tools = client.post("/v1/chat/completions", json={**request, "tools": [TOOL]})
        assert tools.status_code == 200, tools.text
        assert tools.json()["usage"]["prompt_tokens"] > len(case["ids"]) + 50
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        messages = [{"role": "user", "content": [image]}]
        refused = client.post("/v1/chat/completions", json={**request, "messages": messages})
        assert refused.status_code == 400
        assert "image_url" in refused.text


def test_a_prefix_is_found_at_multiples_of_128_tokens(start: Callable[..., Any]) -> None:
    rng = random.Random(11)
    prompt = [rng.randrange(3, 480) for _ in range(300)]
    with httpx.Client(base_url=start(TINY, *SMALL).url, timeout=60) as client:
        answers = [
            client.post("/v1/completions", json=body(ids, max_tokens=8)).json()
            for ids in (prompt, prompt, prompt[:257], prompt[:256], prompt[:100])
        ]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 256, 256, 128, 0]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


def test_answers_take_the_form_of_a_schema_and_have_log_probabilities(start: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance")
    check_schema_and_logprobs(start(TINY, *SMALL).url, thinking=False)


@pytest.mark.parametrize(
    ("streams", "flags"),
    [
        (12, SMALL),
        pytest.param(32, ("--max-num-seqs", "24", "--max-num-batched-tokens", "96"), marks=pytest.mark.slow),
    ],
)
def test_mixed_streams_give_what_each_gives_alone_and_leave_nothing(
    start: Callable[..., Any], streams: int, flags: tuple[str, ...]
) -> None:
    """More streams than rows, so that some wait."""
    rng, server = random.Random(7), start(TINY, *flags)
    requests = mixed(rng, prompts_that_begin_alike(rng, 480))
    check_streams(server, requests, streams, rng)
