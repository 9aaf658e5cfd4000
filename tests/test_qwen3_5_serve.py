"""The Qwen3.5 recipe behind `openinfer serve`, over a real socket; config.json chooses recipe and chat format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_streams import (
    TOOL,
    check_greedy_tokens,
    check_schema_and_logprobs,
    check_streams,
    mixed,
    prompts_that_begin_alike,
)

from openinfer.frontend.chat.formats import default_formats
from openinfer.recipes.qwen3_5 import RECIPE
from openinfer.recipes.qwen3_5.config import MODEL_TYPES

TINY = Path(__file__).parent / "goldens" / "qwen3_5-tiny"


def test_greedy_tokens_are_the_goldens(hybrid: Any, start: Callable[..., Any]) -> None:
    check_greedy_tokens(start(hybrid.path).url, hybrid)


def test_chats_are_rendered_and_read_in_this_familys_format(start: Callable[..., Any]) -> None:
    facts = json.loads((TINY / "golden.json").read_text())
    case = next(c for c in facts["chat_cases"] if c["add_generation_prompt"] and c["enable_thinking"] is None)
    server = start(TINY)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        request = {"messages": case["messages"], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        chat = client.post("/v1/chat/completions", json=request).json()
        assert chat["usage"]["prompt_tokens"] == len(case["ids"])
        # The prompt ends in <think>, so what comes before </think> was thought, not said.
        message = chat["choices"][0]["message"]
        assert message["reasoning"]
        assert not message["content"]
        tools = client.post("/v1/chat/completions", json={**request, "tools": [TOOL]})
        assert tools.status_code == 200, tools.text
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        refused = client.post(
            "/v1/chat/completions", json={**request, "messages": [{"role": "user", "content": [image]}]}
        )
        assert refused.status_code == 400
        assert "image_url" in refused.text


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tools_are_xml_by_default(model_type: str) -> None:
    assert RECIPE.matches({"model_type": model_type})
    assert default_formats(model_type) == ("hermes" if model_type == "qwen3_next" else "qwen3_xml", "qwen3")


def test_answers_take_the_form_of_a_schema_and_have_log_probabilities(start: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance")
    check_schema_and_logprobs(start(TINY).url, enable_thinking=False)


def test_64_mixed_streams_give_what_each_gives_alone_and_leave_nothing(start: Callable[..., Any]) -> None:
    server, rng = start(TINY, "--max-num-seqs", "24", "--max-num-batched-tokens", "96"), random.Random(7)
    check_streams(server, mixed(rng, prompts_that_begin_alike(rng, 480)), 64, rng)
