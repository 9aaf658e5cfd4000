"""Checkpoints that have a tiktoken.model, as Kimi-K2's: the ids are those that the library tiktoken gives."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend.chat_template import ChatTemplate
from openinfer.frontend.errors import ModelFilesError
from openinfer.frontend.http.tokenizer import Tokenizer

BYTES = [*range(33, 127), *range(33), *range(127, 256)]
MADE = (
    *(
        "'s",
        "it",
        "it's",
        "n'",
        " d",
        " do",
        " don",
        "'t",
        " don't",
        "12",
        "23",
        "123",
        "1234",
        "aB",
        "你",
        "好",
        "你好",
    ),
    *(
        "你a",
        " 你",
        "a你",
        "  ",
        "   ",
        "\n\n",
        " \n",
        "aa",
        "aaa",
        "aab",
        "{\n",
        "é",
        "LL",
        "'LL",
        "WE",
        "tool",
        "<|",
        "|>",
    ),
)
"""Some of these reach over a place where text is cut, so they never come up in it."""
HALVES = [b"\xe4\xbd", b"\xe5\xa5"]
TOKENS = [*(bytes([byte]) for byte in BYTES), *HALVES, *(text.encode() for text in MADE)]
FIRST = len(TOKENS)
NAMED = {
    0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False), 23: ("</think>", False), 255: ("[PAD]", True),
}  # fmt: skip


def lines(tokens: list[bytes], ranks: Any = None) -> str:
    pairs = zip(tokens, range(len(tokens)) if ranks is None else ranks, strict=True)
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in pairs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiktoken.model").write_text(lines(TOKENS))
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    named = {str(FIRST + at): {"content": text, "special": special} for at, (text, special) in NAMED.items()}
    config = {"added_tokens_decoder": named, "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("it's I don't; WE'LL", [260, 126, 40, 266, 26, 126, 289, 288]),
        ("DON'T it'S", [35, 46, 45, 6, 51, 126, 259, 6, 50]),
        ("你好你a 你〇", [274, 272, 64, 126, 272, 227, 128, 135]),
        ("12341234 ١٢٣٤", [269, 19, 267, 18, 19, 126, 217, 161, 217, 162, 217, 163, 217, 164]),
        ("camelaBaabaaaab", [66, 64, 76, 68, 75, 64, 33, 284, 282, 284]),
        ("{\n  \n\n   x \n", [285, 278, 280, 278, 126, 87, 281]),
        ("é😀é", [286, 240, 159, 152, 128, 286]),
        (
            "<|im_end|>tool<|tool_calls_section_begin|><|reserved_token_296|></think>",
            [295, 290, 304, 296, 316],
        ),
    ],
)
def test_ids_are_tiktokens(folder: Path, text: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode_short(text, add_special_tokens=True) == ids
    assert tokenizer.decode(ids, False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_special_tokens_are_those_of_the_config(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens == {"eos_token": "[EOS]"}
    assert [tokenizer.token_id(text) for text, _ in NAMED.values()] == [FIRST + at for at in NAMED]
    ids = [FIRST + 2, 64, FIRST + 11, FIRST + 3, FIRST + 23]
    assert tokenizer.decode(ids, True) == "a<|tool_calls_section_begin|></think>"
    table = tokenizer.token_table("")
    assert table is not None
    assert len(table.tokens) == FIRST + 256
    assert (FIRST + 2 in table.special_ids, FIRST + 11 in table.special_ids) == (True, False)
    again = Tokenizer(type(tokenizer._core).from_str(table.definition), {})
    assert again.encode_short("你好 don't<|im_end|>") == tokenizer.encode_short("你好 don't<|im_end|>")


@pytest.mark.attack
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "line 1: the token '' is of 0 bytes"),
        ("\n" * (8 << 20), "more than 262144 lines"),
        (" " * (8 << 20), "line 1: the token '' is of 0 bytes"),
        ("a " * (4 << 20), "line 1: 'a' is not base64"),
        ("x" * (9 << 20), "at most 8388608 are read"),
        (lines(TOKENS) + "!!!! 296\n", f"line {FIRST + 1}: '!!!!' is not base64"),
        (
            lines(TOKENS).replace(" 7\n", " 1099511627776\n"),
            "line 8: the rank '1099511627776' is none of 0 to 292",
        ),
        (lines(TOKENS).replace(" 7\n", " 6\n"), "line 8: the rank '6' is that of line 7"),
        (lines(TOKENS).replace(" 7\n", " -7\n"), "line 8: the rank '-7' is none of"),
        (lines([*TOKENS, b"it"]), f"line {FIRST + 1}: the token 'aXQ=' is that of line 260"),
        (lines(TOKENS[1:]), "no token for the byte 0x21"),
        (lines([*TOKENS, b"x" * 513]), "is of 513 bytes"),
        (b"\xff\xfe 0\n", "cannot be read"),
    ],
    ids=range(13),
)
def test_what_is_no_vocabulary_is_refused_in_a_line(folder: Path, content: Any, reason: str) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (folder / "tiktoken.model").write_bytes(data)
    began = time.process_time()
    with pytest.raises(ModelFilesError, match=r"tiktoken\.model") as caught:
        Tokenizer.load(folder)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(folder))
    assert time.process_time() - began < 5


@pytest.mark.attack
def test_a_vocabulary_of_more_pairs_than_any_is_refused(folder: Path) -> None:
    """Every half of each token is a token: a true vocabulary has two pairs for each."""
    words = [f"{number:b}"[1:].translate({48: "a", 49: "b"}).encode() for number in range(4, 1 << 17)]
    (folder / "tiktoken.model").write_text(lines([*TOKENS[:256], *words]))
    with pytest.raises(ModelFilesError, match="more than 1048576 pairs"):
        Tokenizer.load(folder)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("config.json", {"model_type": "kimi_k3"}, "text of model_type 'kimi_k3' is split is not known"),
        ("config.json", {"model_type": ["kimi_k2"]}, "is not known"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "must be an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "a"}}}, "has '7'; ids from 293"),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(1 << 40): {"content": "a"}}}, "ids from 293 to 548"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"293": {}}}, "with a content"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"293": {"content": "<|reserved_token_294|>"}}}, "twice"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"293": {"content": "it's"}}}, "is there twice"),
    ],
)  # fmt: skip
def test_what_the_configs_must_say(folder: Path, name: str, value: Any, reason: str) -> None:
    (folder / name).write_text(json.dumps(value))
    with pytest.raises(ModelFilesError) as caught:
        Tokenizer.load(folder)
    assert reason in str(caught.value)
    assert str(folder) in str(caught.value)


def test_tokenizer_json_comes_first(folder: Path) -> None:
    core = Tokenizer.load(folder)._core
    core.add_tokens(["more"])
    core.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).token_id("more") == FIRST + 256


TEMPLATE = """
{%- macro text(msg) -%}
  {%- set c = msg.get('content') -%}
  {%- if c is string -%}{{ c }}
  {%- elif c is not none -%}{% for part in c -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{% macro turn(message) -%}
  {%- set who = message.get('name') or message['role'] -%}
  {%- if message['role'] in ['user', 'assistant'] -%}<|im_{{ message['role'] }}|>{{ who }}<|im_middle|>
  {%- else -%}<|im_system|>{{ who }}<|im_middle|>{%- endif -%}
{%- endmacro -%}
{%- macro calls(message) -%}
  <|tool_calls_section_begin|>
  {%- for call in message['tool_calls'] -%}
    <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
    {%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}
    {%- else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>
  {%- endfor -%}
  <|tool_calls_section_end|>
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for at in range(messages|length-1, -1, -1) -%}
  {%- if messages[at]['role'] == 'assistant' and not messages[at].get('tool_calls') -%}
    {%- set ns.last = at -%}{%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages[:ns.last+1] + messages[ns.last+1:] -%}
  {{ turn(message) }}
  {%- if message['role'] == 'assistant' -%}
    <think>{{ message.get('reasoning_content', '') if loop.index0 > ns.last else '' }}</think>{{ text(message) }}
    {%- if message.get('tool_calls') -%}{{ calls(message) }}{%- endif -%}
  {%- elif message['role'] == 'tool' -%}
    {%- set id = message.tool_call_id -%}
    ## Return of {{ id }}
{{ text(message) }}
  {%- else -%}{{ text(message) }}{%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
"""As Kimi-K2-Thinking's is built; Kimi-K2-Instruct's has no thoughts."""
OPEN, CLOSE = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"
CALL = f'{OPEN}functions.weather:0<|tool_call_argument_begin|>{{"city": "Köln"}}{CLOSE}'
TOOL: dict[str, Any] = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def test_the_loop_with_ids_of_the_model(start: Any, tokenizer: Tokenizer) -> None:
    """What a chat gets as the id of a call is what the next prompt has, on each API."""
    script = [*tokenizer.encode_short(f"<think>hm</think>I look.{CALL}"), 2]
    app = {"template": ChatTemplate(TEMPLATE, {}), "tool_parser": "kimi_k2", "reasoning_parser": "kimi_k2"}
    live = start({"script": script}, app)
    ask = [{"role": "user", "content": "Weather?"}]
    said = live.post(
        "/v1/chat/completions", messages=ask, tools=[{"type": "function", "function": TOOL}]
    ).json()
    message = said["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "I look.")
    (call,) = message["tool_calls"]
    assert (call["id"], json.loads(call["function"]["arguments"])) == (
        "functions.weather:0",
        {"city": "Köln"},
    )
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    render = {"messages": [*ask, message, result], "tools": [{"type": "function", "function": TOOL}]}
    ids = live.post("/v1/chat/completions/render", **render).json()["token_ids"]
    declared = json.dumps([{"type": "function", "function": TOOL}], separators=(",", ":"))
    assert tokenizer.decode(ids, False) == (
        f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|><|im_user|>user<|im_middle|>Weather?<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|><think>hm</think>I look.{CALL}<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\nsunny<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    null = {"role": "assistant", "content": "x", "reasoning_content": None}
    ids = live.post(
        "/v1/chat/completions/render", messages=[*ask, {**null, "tool_calls": [call]}, result]
    ).json()
    assert "<think></think>x" in tokenizer.decode(ids["token_ids"], False)
    tool = {"type": "function", **TOOL}
    items = live.post("/v1/responses", input="Weather?", tools=[tool]).json()["output"]
    assert [one["call_id"] for one in items if one["type"] == "function_call"] == ["functions.weather:0"]
    tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
    blocks = live.post("/v1/messages", max_tokens=300, messages=ask, tools=[tool]).json()["content"]
    assert [block["id"] for block in blocks if block["type"] == "tool_use"] == ["functions.weather:0"]
