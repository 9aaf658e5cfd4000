"""Tools and reasoning over /v1/chat/completions, with the official client; streamed is the same as whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from openinfer.frontend.chat import DeepSeekV4Renderer, DeepSeekV32Renderer, Message, coded_renderer
from openinfer.frontend.errors import ModelFilesError
from openinfer.frontend.http import ChatTemplate

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
ASK: list[Any] = [{"role": "user", "content": "Weather in Bonn?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif -%}"
    "{%- for m in messages -%}[{{ m.role }}]{{ m.reasoning }}{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ c.function.name }}{{ c.function.arguments.city }}{%- endfor -%}"
    "{%- endfor -%}{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"
)


@pytest.fixture(scope="module")
def speak(start: Any, tokenizer: Any) -> Iterator[Any]:
    """speak(text, **app): an OpenAI client of a server whose model always says text."""
    clients: list[openai.OpenAI] = []

    def make(text: str, end: bool = True, **app: Any) -> openai.OpenAI:
        script = [*tokenizer._core.encode(text, add_special_tokens=False).ids, *([2] if end else [])]
        options = {
            "template": ChatTemplate(TEMPLATE, {}),
            "tool_parser": "hermes",
            "reasoning_parser": "qwen3",
        }
        live = start({"script": script}, options | app)
        clients.append(openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="x", max_retries=0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def whole_and_streamed(client: openai.OpenAI, **options: Any) -> Iterator[dict[str, Any]]:
    """What both ways say: role, content, reasoning, calls, finish_reason, completion tokens."""
    request = {"model": "fake", "messages": ASK, "tools": [WEATHER], "max_tokens": 300} | options
    answer = client.chat.completions.create(**request)
    (choice,) = answer.choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    yield {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", "") or "",
        "calls": calls,
        "finish": choice.finish_reason,
        "tokens": answer.usage.completion_tokens,
    }
    streamed: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None, "tokens": 0}
    for chunk in client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.usage:
            streamed["tokens"] = chunk.usage.completion_tokens
            continue
        (part,) = chunk.choices
        streamed["content"] += part.delta.content or ""
        streamed["reasoning"] += getattr(part.delta, "reasoning", "") or ""
        for call in part.delta.tool_calls or ():
            if call.index == len(streamed["calls"]):
                assert call.id.startswith("call_")
                streamed["calls"].append((call.function.name, call.function.arguments))
                continue
            assert (call.index, call.id, call.function.name) == (len(streamed["calls"]) - 1, None, None)
            name, before = streamed["calls"].pop()
            streamed["calls"].append((name, before + call.function.arguments))
        streamed["finish"] = part.finish_reason
    yield streamed


ARGUMENTS = ("weather", '{"city": "Bonn", "days": 2}')


@pytest.mark.parametrize(
    ("text", "options", "content", "reasoning", "calls", "finish"),
    [
        ("<think>\nhm\n</think>\n\nSunny.", {}, "Sunny.", "hm", [], "stop"),
        (f"<think>\nhm\n</think>\n\n{CALL}", {}, "", "hm", [ARGUMENTS], "tool_calls"),
        (f"I look.\n{CALL}\n{CALL}", {}, "I look.", "", [ARGUMENTS] * 2, "tool_calls"),
        (f"{CALL}\n{CALL}", {"parallel_tool_calls": False}, "", "", [ARGUMENTS], "tool_calls"),
        (CALL, {"tool_choice": "none"}, CALL, "", [], "stop"),
        (CALL, {"tools": openai.NOT_GIVEN}, CALL, "", [], "stop"),
        ("<think>a</think>b", {"extra_body": {"include_reasoning": False}}, "b", "", [], "stop"),
        # Stop strings are looked for in what a client reads as the answer.
        ("<think>\nno end\n</think>\n\nThe end is.", {"stop": ["end"]}, "The ", "no end", [], "stop"),
        ("<think>ab</think>a b", {"stop": ["b", "think"]}, "a ", "ab", [], "stop"),
        (
            f"I look.\n{CALL}\nThe end",
            {"stop": ["city", "weather", "end"]},
            "I look.\nThe ",
            "",
            [ARGUMENTS],
            "tool_calls",
        ),
        (f"{CALL}", {"stop": ["}", "tool_call"]}, "", "", [ARGUMENTS], "tool_calls"),
        ("<think>a</think>one </", {"stop": ["</b>"]}, "one </", "a", [], "stop"),
    ],
)
def test_streamed_is_whole(
    speak: Any, text: str, options: Any, content: str, reasoning: str, calls: Any, finish: str
) -> None:
    whole, streamed = whole_and_streamed(speak(text), **options)
    assert whole == streamed
    assert (whole["content"], whole["reasoning"]) == (content, reasoning)
    assert whole["calls"] == calls
    assert whole["finish"] == finish


def test_a_length_cut_stays_length(speak: Any) -> None:
    client = speak(f"{CALL}\nand then more and more", end=False)
    whole, streamed = whole_and_streamed(client, max_tokens=len(CALL))
    assert whole["finish"] == streamed["finish"] == "length"
    whole_calls = len(whole["calls"])
    assert whole["calls"] == streamed["calls"][:whole_calls] == [ARGUMENTS] * whole_calls != []


def test_a_call_that_is_cut_off_ends_as_json(speak: Any) -> None:
    whole, streamed = whole_and_streamed(speak(CALL[:-20]))
    assert whole == streamed
    assert whole["calls"] == [("weather", '{"city": "Bonn"}')]
    assert (whole["content"], whole["finish"]) == (', "day', "tool_calls")


def test_the_other_formats(speak: Any) -> None:
    xml = "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    whole, streamed = whole_and_streamed(speak(xml, tool_parser="qwen3_xml"))
    assert whole == streamed
    assert whole["calls"] == [("weather", '{"days": 2}')]
    d = "｜DSML｜"
    dsml = f'x<{d}tool_calls><{d}invoke name="weather"></{d}invoke></{d}tool_calls>'
    client = speak(dsml, tool_parser="deepseek_v4", template=DeepSeekV4Renderer())
    whole, streamed = whole_and_streamed(client)
    assert whole == streamed
    assert (whole["content"], whole["calls"]) == ("x", [("weather", "{}")])


def test_logprobs_and_ids_go_with_held_back_text(speak: Any) -> None:
    stream = speak(f"I look.\n{CALL}").chat.completions.create(
        model="fake",
        messages=ASK,
        tools=[WEATHER],
        stream=True,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk.choices[0] for chunk in stream]
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    ids = [one for chunk in chunks for one in getattr(chunk, "token_ids", None) or ()]
    assert len(entries) == len(ids) > 20


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_need_an_engine_with_grammars(speak: Any, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="this engine has no grammars") as caught:
        next(whole_and_streamed(speak(CALL), tool_choice=choice))
    assert caught.value.param == "tool_choice"


def test_the_loop_with_results(speak: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    answer = speak("ok").chat.completions.create(
        model="fake", messages=messages, tools=[WEATHER], extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].message.content == "ok"


def test_effort_none_switches_thinking_off(speak: Any) -> None:
    client = speak("ok")
    counts = [
        client.chat.completions.create(model="fake", messages=ASK, **options).usage.prompt_tokens
        for options in (
            {},
            {"reasoning_effort": "none"},
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        )
    ]
    assert counts[0] < counts[1] == counts[2]


def test_bad_tools_are_named(start: Any) -> None:
    live = start(app={"tool_parser": "hermes"})
    for tools, word in (
        ([{"type": "web"}], "type"),
        ([WEATHER] * 129, "128"),
        ([{"type": "function", "function": {"name": "a b"}}], "name"),
    ):
        answer: httpx.Response = live.post("/v1/chat/completions", messages=ASK, tools=tools)
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "tools"


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


D = "｜DSML｜"
S, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
R = "<｜latest_reminder｜>"
CALLED = {"role": "assistant", "content": "", "reasoning": "r", "tool_calls": [
    {"id": "a", "function": {"name": "f", "arguments": {"x": "1", "y": [2]}}},
    {"id": "b", "function": {"name": "g", "arguments": {}}},
]}  # fmt: skip
RESULTS = [
    {"role": "tool", "tool_call_id": "b", "content": "2nd"},
    {"role": "tool", "tool_call_id": "a", "content": "1st"},
]
CALLS = (
    f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="x" string="true">1</{D}parameter>\n'
    f'<{D}parameter name="y" string="false">[2]</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="g">\n\n</{D}invoke>\n</{D}tool_calls>{E}'
)


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([{"role": "user", "content": "hi"}], {}, f"{S}{U}hi{A}</think>"),
        ([said("system", "s"), said("user", "hi")], {"thinking": True}, f"{S}s{U}hi{A}<think>"),
        (
            [said("user", "1"), {**said("assistant", "2"), "reasoning": "r"}, said("user", "3")],
            {"enable_thinking": True},
            f"{S}{U}1{A}</think>2{E}{U}3{A}<think>",
        ),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], {}, f"{S}{U}a\n\nb{A}</think>"),
        ([{"role": "user", "content": "a"}], {"reasoning_effort": "none"}, f"{S}{U}a{A}</think>"),
        (
            [{"role": "user", "content": "a"}, CALLED, *RESULTS],
            {},
            (
                f'{S}{U}a{A}</think>\n\n<{D}tool_calls>\n<{D}invoke name="f">\n'
                f'<{D}parameter name="x" string="true">1</{D}parameter>\n'
                f'<{D}parameter name="y" string="false">[2]</{D}parameter>\n</{D}invoke>\n'
                f'<{D}invoke name="g">\n\n</{D}invoke>\n</{D}tool_calls>{E}'
                f"{U}<tool_result>1st</tool_result>\n\n<tool_result>2nd</tool_result>{A}</think>"
            ),
        ),
        (
            [said("system", "s"), said("latest_reminder", "today"), said("user", "a")],
            {"thinking": True},
            f"{S}s{R}today{U}a{A}<think>",
        ),
        ([said("user", "a"), said("latest_reminder", "now")], {}, f"{S}{U}a{A}</think>{R}now"),
        (
            [said("user", "a"), said("latest_reminder", "now"), said("assistant", "b"), said("user", "c")],
            {},
            f"{S}{U}a{A}</think>{R}now{A.join(['b' + E + U + 'c', '</think>'])}",
        ),
        (
            [said("developer", "d"), said("user", "a"), said("assistant", "b"), said("user", "c")],
            {},
            f"{S}{U}d{U}a{A}</think>b{E}{U}c{A}</think>",
        ),
        (
            [said("developer", "d"), said("user", "a"), said("assistant", "b") | {"reasoning": "r"}, said("user", "c")],
            {"thinking": True},
            f"{S}{U}a{A}</think>b{E}{U}c{A}<think>",
        ),
        (
            [said("user", "a"), {**said("assistant", "b"), "reasoning": "r"}],
            {"thinking": True},
            f"{S}{U}a{A}<think>r</think>b{E}{A}<think>",
        ),
        ([{"role": "user", "content": [{"text": "a"}, {"text": "b"}]}], {}, f"{S}{U}ab{A}</think>"),
        (
            [CALLED, RESULTS[0], said("user", "x"), RESULTS[1]],  # results in order around what the user said
            {},
            f"{S}{CALLS}{U}<tool_result>1st</tool_result>\n\nx\n\n<tool_result>2nd</tool_result>{A}</think>",
        ),
        (
            [said("user", "a"), said("developer", "d"), said("user", "b"), said("system", "s"), said("user", "c")],
            {"thinking": True},  # what is left out still parts the turns around it
            f"{S}{U}a{U}bs{U}c{A}<think>",
        ),
        (
            [{"role": "tool", "tool_call_id": "x", "content": [{"text": "a"}, {"text": "b"}]}],
            {},
            f"{S}{U}<tool_result>a\n\nb</tool_result>{A}</think>",
        ),
    ],
)  # fmt: skip
def test_deepseek_prompts(messages: list[Message], options: dict[str, Any], text: str) -> None:
    assert DeepSeekV4Renderer().render(messages, kwargs=options) == text


def test_deepseek_tools_keep_all_reasoning() -> None:
    messages = [{"role": "user", "content": "a"}, CALLED, *RESULTS, {"role": "user", "content": "b"}]
    text = DeepSeekV4Renderer().render(messages, tools=[WEATHER], kwargs={"reasoning_effort": "max"})
    assert text.startswith(f"{S}Reasoning Effort: Beyond maximum")
    assert "\n\n## Tools\n\nYou have access" in text
    assert json.dumps(WEATHER["function"]) in text
    assert f"{U}a{A}<think>r</think>\n\n<｜DSML｜" in text
    assert text.endswith(
        f"{U}<tool_result>1st</tool_result>\n\n<tool_result>2nd</tool_result>\n\nb{A}<think>"
    )


@pytest.mark.parametrize("role", ["developer", "system", None])
def test_deepseek_tools_go_to_the_first_message_that_may_have_them(role: str | None) -> None:
    messages = [
        said("user", "a"),
        said("assistant", "b"),
        *([said(role, "here")] if role else []),
        said("user", "c"),
    ]
    text = DeepSeekV4Renderer().render(messages, tools=[WEATHER], kwargs={"thinking": True})
    start, _, rest = text.partition("\n\n## Tools")
    assert text.count("## Tools") == 1
    assert start == S + (
        "" if role is None else f"{U}a{A}<think></think>b{E}{U if role == 'developer' else ''}here"
    )
    assert rest.endswith(f"invoke tool calls.\n{'' if role else f'{U}a{A}<think></think>b{E}'}{U}c{A}<think>")


ENCODER = """
import os
REASONING_EFFORT_PROMPTS: Dict[str, str] = {
    "low": "", "high": ("H" "igh"), "max": "Max"}
DEFAULT_REASONING_EFFORT = "high"
os.abort()
"""
ENCODERS = {
    "published since July": (
        ENCODER,
        {None: "High", "low": "", "minimal": "High", "high": "High", "xhigh": "Max", "max": "Max"},
    ),
    "the preview's": (
        "REASONING_EFFORT_MAX = (\n 'M'\n 'ax')\nx = f(1)\n",
        {None: "", "high": "", "max": "Max"},
    ),
    "none": (
        None,
        {None: "", "low": "", "high": "", "max": "Reasoning Effort: Absolute maximum", "xhigh": "Reas"},
    ),
}


@pytest.mark.parametrize(("encoder", "heads"), ENCODERS.values(), ids=list(ENCODERS))
def test_deepseek_efforts_are_those_of_the_checkpoint(
    encoder: str | None, heads: Any, tmp_path: Path
) -> None:
    if encoder is not None:
        (tmp_path / "encoding").mkdir()
        (tmp_path / "encoding/encoding_dsv4.py").write_text(encoder)
    made = DeepSeekV4Renderer.of(tmp_path)
    target, kwargs = made.spec
    assert target == "openinfer.frontend.chat:DeepSeekV4Renderer"
    for renderer in (made, DeepSeekV4Renderer(**kwargs)):
        for effort, head in heads.items():
            options = {"thinking": True} | ({} if effort is None else {"reasoning_effort": effort})
            text = renderer.render([said("user", "hi")], kwargs=options)
            found = text.removeprefix(S).removesuffix(f"{U}hi{A}<think>")
            assert found.startswith(head)
            assert bool(found) == bool(head)
        chat = renderer.render([said("user", "hi")], kwargs={"thinking": False, "reasoning_effort": "max"})
        assert chat == f"{S}{U}hi{A}</think>"


@pytest.mark.parametrize(
    ("encoder", "complaint"),
    [
        ("", "has neither REASONING_EFFORT_PROMPTS"),
        ("REASONING_EFFORT_PROMPTS = {'low': 1}", "has neither"),
        ("REASONING_EFFORT_PROMPTS = {'high': 'x'}", "DEFAULT_REASONING_EFFORT is 'low'"),
        ("REASONING_EFFORT_PROMPTS = make()", "cannot be read"),
        ("def", "cannot be read"),
        ("\0", "cannot be read"),
        ("REASONING_EFFORT_MAX = " + "(" * 100000, "cannot be read"),
        ("x = '" + "x" * (1 << 20) + "'", "bytes, at most"),
    ],
    ids=range(8),
)
def test_deepseek_encoders_that_say_nothing_are_refused(encoder: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding/encoding_dsv4.py").write_text(encoder)
    with pytest.raises(ModelFilesError, match=rf"encoding_dsv4\.py.*{complaint}"):
        DeepSeekV4Renderer.of(tmp_path)


V32_CALLS = CALLS.replace("tool_calls", "function_calls")
V32_RESULTS = "\n\n<function_results>\n<result>1st</result>\n<result>2nd</result>\n</function_results>\n\n"
ANSWERED = {**said("assistant", "b"), "reasoning": "r"}


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([said("system", "s"), said("user", "hi")], {}, f"{S}s{U}hi{A}</think>"),
        ([said("user", "hi")], {"thinking": True}, f"{S}{U}hi{A}<think>"),
        ([said("user", "a"), said("user", "b")], {"thinking": True}, f"{S}{U}a{A}</think>{U}b{A}<think>"),
        (
            [said("user", "a"), ANSWERED, said("user", "c"), ANSWERED, said("user", "d")],
            {"reasoning_effort": "high"},
            f"{S}{U}a{A}</think>b{E}{U}c{A}</think>b{E}{U}d{A}<think>",
        ),
        ([said("user", "a"), CALLED, *RESULTS], {}, f"{S}{U}a{A}</think>{V32_CALLS}{V32_RESULTS}</think>"),
        (
            [said("user", "a"), CALLED, *RESULTS],  # thoughts of the turn that goes on are kept
            {"thinking": True},
            f"{S}{U}a{A}<think>r</think>{V32_CALLS}{V32_RESULTS}<think>",
        ),
        (
            [said("user", "a"), CALLED, *RESULTS, ANSWERED, said("user", "c")],
            {"thinking": True},
            f"{S}{U}a{A}</think>{V32_CALLS}{V32_RESULTS}</think>b{E}{U}c{A}<think>",
        ),
        (
            [said("developer", "d"), said("assistant", "b"), said("developer", "e")],
            {},
            f"{S}{U}\n\n# The user's message is: d{A}</think>b{E}{U}\n\n# The user's message is: e{A}</think>",
        ),
        (
            [said("developer", "d"), said("assistant", "b"), said("user", "c")],
            {"thinking": True},
            f"{S}b{E}{U}c{A}<think>",
        ),
        ([said("user", "a"), said("assistant", "b")], {}, f"{S}{U}a{A}</think>b{E}{A}</think>"),
    ],
)  # fmt: skip
def test_deepseek_v32_prompts(messages: list[Message], options: dict[str, Any], text: str) -> None:
    assert DeepSeekV32Renderer("{tool_schemas}").render(messages, kwargs=options) == text


def test_deepseek_v32_says_of_tools_what_its_encoder_says(tmp_path: Path) -> None:
    assert coded_renderer(tmp_path, "deepseek_v32") is None  # V3.2-Exp, which has a template
    (tmp_path / "encoding").mkdir()
    encoder = tmp_path / "encoding/encoding_dsv32.py"
    text = "# T <{dsml_token}x>\n{thinking_start_token}.{thinking_end_token}\n{tool_schemas}\n"
    encoder.write_text(f"import os\nos.abort()\nTOOLS_SYSTEM_TEMPLATE = {text!r}\n")
    made = coded_renderer(tmp_path, "deepseek_v32")
    assert isinstance(made, DeepSeekV32Renderer)
    assert made.spec.target == "openinfer.frontend.chat:DeepSeekV32Renderer"
    tools = f"\n\n# T <{D}x>\n<think>.</think>\n{json.dumps(WEATHER['function'])}\n"
    for renderer in (made, DeepSeekV32Renderer(**made.spec.kwargs)):
        assert renderer.render([said("user", "a")], tools=[WEATHER]) == f"{S}{tools}{U}a{A}</think>"
        chat = [said("system", "s"), said("user", "a")]
        assert renderer.render(chat, tools=[WEATHER]) == f"{S}s{tools}{U}a{A}</think>"
    for wrong in ("TOOLS_SYSTEM_TEMPLATE = 'x'", "", "TOOLS_SYSTEM_TEMPLATE = f()"):
        encoder.write_text(wrong)
        with pytest.raises(ModelFilesError, match=r"encoding_dsv32\.py"):
            coded_renderer(tmp_path, "deepseek_v32")


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": NaN}', '{"path": "a.py", "text": "half', "[" * 999, "[1]"]
)
def test_a_history_with_arguments_that_are_no_json_goes_on(
    start: Any, tokenizer: Any, arguments: str
) -> None:
    template = ChatTemplate("{{ messages[1].tool_calls[0].function.arguments | tojson }}", {})
    live = start(app={"template": template})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]
    answer = live.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer.status_code == 200
    assert "raw_arguments" in answer.headers["warning"]
    ids = live.post("/tokenize", messages=messages).json()["tokens"]
    assert tokenizer.decode(ids, False) == json.dumps({"raw_arguments": arguments})


@pytest.mark.parametrize("arguments", [["x"], 5, True])
def test_arguments_that_are_no_text_are_a_400(start: Any, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    answer = start().post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer.status_code == 400
    assert "messages[1].tool_calls[0].function.arguments" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("with_tools", "warns"), [(None, True), (TEMPLATE, False)])
def test_a_template_without_tools_warns(start: Any, with_tools: str | None, warns: bool) -> None:
    app = {"template": ChatTemplate("{{ messages }}", {}, with_tools), "tool_parser": "pythonic"}
    answer = start({}, app).post("/v1/chat/completions", messages=ASK, max_tokens=2, tools=[WEATHER])
    assert ("the model does not see the tools" in answer.headers.get("warning", "")) == warns
