"""Bodies that nobody should send: never a 500, and everything is free again afterwards. Seeded."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from openinfer.frontend import ThreadDriver
from openinfer.frontend.http import ChatTemplate, Tokenizer, create_app, find_templates
from openinfer.frontend.testing import FakeEngine

DATA = Path(__file__).parent / "data"
TEXT = {"role": "user", "content": "x"}
VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 3.5, 2**70, 1e300, "", "x", "\ud800"),
    *("none", "auto", "high", [], {}, [1], [[5]], ["a"]),
    *([{}], [None], {"a": 1}, {"messages": 1}, {"format": {}}, {"effort": "none"}, {"type": "tool"}, [TEXT]),
    [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "user", "content": [None, 3]}, TEXT],
    [{"role": ["x"], "content": "y"}],
    [{"role": {}, "type": "message", "content": "x"}],
    [{"role": "user", "content": "x", "tool_calls": 3}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}, TEXT],
    [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}]}],
    [{"type": "function_call", "name": 3, "arguments": {}}],
    [{"type": "function_call_output", "output": None}],
    [{"type": ["a"]}],
    [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]}],
    [{"name": "f", "input_schema": {}}],
    [{"type": "function", "name": "f", "parameters": {}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}],
    [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": 3}}}}],
    [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"required": {"a": 1}}}}],
    [
        {
            "type": "function",
            "strict": True,
            "name": "f",
            "function": {
                "name": "f",
                "strict": True,
                "parameters": {
                    "properties": {
                        "a": {"$ref": "#/a/b"},
                        "b": {"enum": [[], {}, None]},
                        "c": {"type": ["string", 3]},
                        "d": {"anyOf": 3, "const": "x"},
                    },
                    "required": ["a", 3],
                },
            },
        }
    ],
    *("required", {"type": "function", "name": "f", "function": {"name": "f"}}, {"type": "any"}),
    *({"type": "json_object"}, {"type": "json_schema", "schema": {}, "json_schema": {"schema": {"type": 3}}}),
    *({"format": {"type": "json_schema", "schema": {"not": 1}, "name": "x"}}, {"regex": "("}, {"choice": []}),
    *('start: "a"', 'root ::= "a"', '{"type": "object"}'),
]
BASES: dict[str, dict[str, Any]] = {
    "CompletionBody": {"prompt": [5], "max_tokens": 3},
    "ChatBody": {"messages": [TEXT], "max_tokens": 3},
    "ResponsesBody": {"input": "x", "max_output_tokens": 3},
    "MessagesBody": {"messages": [TEXT], "max_tokens": 3},
    "TokenizeBody": {},
    "DetokenizeBody": {},
    "LoadBody": {"lora_name": "one", "lora_path": "/bad"},
    "UnloadBody": {"lora_name": "one"},
    "UpdateBody": {"path": "/nowhere", "version": "1"},
    "SleepBody": {},
    "WakeBody": {},
}


@pytest.mark.parametrize("cases", [50, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tools", ["hermes", "qwen3_xml"])
def test_no_body_is_a_500(cases: int, tools: str) -> None:
    features = ["penalties", "logit_bias", "bad_words", "allowed_token_ids", "grammar"]
    driver = ThreadDriver(lambda: FakeEngine(features=features))
    tokenizer = Tokenizer.load(DATA, 1024)
    source, _ = find_templates(DATA, tokenizer.config)
    assert source is not None
    template = ChatTemplate(source, tokenizer.special_tokens)
    options: dict[str, Any] = {"tool_parser": tools, "reasoning_parser": "qwen3"}
    app = create_app(driver, tokenizer=tokenizer, template=template, weight_updates=True, **options)

    async def main() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as client,
        ):
            document = (await client.get("/openapi.json")).json()
            await bombard(client, document, cases)
            assert not app.state.service.active
            await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            assert driver.stats().kv_used_tokens == 0

    asyncio.run(main())


async def bombard(client: httpx.AsyncClient, document: Any, cases: int) -> None:
    rng = random.Random(7)
    seen: set[int] = set()
    for path, operations in document["paths"].items():
        if "post" not in operations:
            continue
        reference = operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        name = reference.rsplit("/", 1)[1]
        fields = sorted(document["components"]["schemas"][name]["properties"])
        for case in range(cases):
            chosen = rng.sample(fields, min(len(fields), rng.choice((1, 1, 2, 3))))
            body = BASES[name] | {field: rng.choice(VALUES) for field in chosen}
            if not case:  # the 404
                body = BASES[name] | {"model": "another"}
            raw = json.dumps(body)
            if rng.random() < 0.1:
                raw = raw[: rng.randrange(len(raw))]
            answer = await client.post(path, content=raw.encode())
            assert answer.status_code in (200, 400, 404), (path, raw, answer.text)
            seen.add(answer.status_code)
    assert seen == {200, 400, 404}
