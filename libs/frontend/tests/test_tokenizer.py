"""Tokenizer and chat template against goldens made with the reference library."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from openinfer.frontend.errors import APIError, ModelFilesError
from openinfer.frontend.http import ChatTemplate, Tokenizer, find_templates
from openinfer.frontend.http.openai.completions import CompletionShape
from openinfer.frontend.http.params import SamplingDefaults
from openinfer.sampler import SamplingParams

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "golden.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DATA)


@pytest.mark.parametrize("case", GOLDEN["tokenizer_cases"], ids=lambda case: repr(case["text"])[:30])
def test_encode_and_decode(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert asyncio.run(tokenizer.encode(case["text"], add_special_tokens=True)) == case["ids"]
    assert tokenizer.decode(case["ids"], False) == case["decoded"]
    assert tokenizer.decode(case["ids"], True) == case["decoded_skip_special"]


@pytest.mark.parametrize("index", range(len(GOLDEN["chat_cases"])))
def test_chat_template(tokenizer: Tokenizer, index: int) -> None:
    case = GOLDEN["chat_cases"][index]
    source, _ = find_templates(DATA, tokenizer.config)
    assert source is not None
    template = ChatTemplate(source, tokenizer.special_tokens)
    kwargs = {} if case["enable_thinking"] is None else {"enable_thinking": case["enable_thinking"]}
    text = template.render(
        case["messages"], add_generation_prompt=case["add_generation_prompt"], kwargs=kwargs
    )
    assert text == case["text"]
    assert asyncio.run(tokenizer.encode(text, add_special_tokens=False)) == case["ids"]


def test_long_texts_give_the_same_ids_from_the_worker(tokenizer: Tokenizer) -> None:
    text = "Hello, world! " * 2000
    assert asyncio.run(tokenizer.encode(text, add_special_tokens=True)) == tokenizer._core.encode(text).ids


def changed(**parts: Any) -> Tokenizer:
    core = json.loads((DATA / "tokenizer.json").read_text()) | parts
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(core)), {})


BACKTRACKS = {"Regex": "(x+x+)+y"}


@pytest.mark.attack
@pytest.mark.parametrize("length", [60, 20_000])
def test_a_text_that_panics_is_refused_and_the_next_is_served(start: Any, length: int) -> None:
    split = {"type": "Split", "pattern": BACKTRACKS, "behavior": "Isolated", "invert": False}
    live = start(
        {"max_model_len": 100_000, "features": ["bad_words"]}, app={"tokenizer": changed(pre_tokenizer=split)}
    )
    bad = "x" * length
    for path, body in (
        ("/v1/completions", {"prompt": bad}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": bad}]}),
        ("/tokenize", {"prompt": bad}),
        *([("/v1/completions", {"prompt": "a", "bad_words": [bad]})] if length < 256 else []),
    ):
        answer = live.post(path, max_tokens=1, **body)
        assert answer.status_code == 400, answer.text
        assert "the tokenizer fails on this input" in answer.json()["error"]["message"]
    assert live.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


@pytest.mark.attack
@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_panic_end_their_own_answer(start: Any, stop: str | None, stream: bool) -> None:
    replace = {"type": "Replace", "pattern": BACKTRACKS, "content": "z"}
    tokenizer = changed(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, replace]})
    tokenizer._core.add_tokens(["x" * 60])
    bad, good = tokenizer.token_id("x" * 60), tokenizer.token_id("a")
    live = start({"script": [good, good, bad, good]}, app={"tokenizer": tokenizer})
    answer = live.post("/v1/completions", prompt="a", max_tokens=4, stream=stream, stop=stop)
    assert answer.status_code == 500 or stream
    assert answer.text.count("the tokenizer fails on this input") == 1
    assert answer.text.count("[DONE]") == (answer.status_code == 200)  # its head may have been sent before
    assert live.post("/detokenize", tokens=[bad]).status_code == 500
    assert live.post("/v1/completions", prompt="a", max_tokens=2).json()["choices"][0]["text"] == "aa"


def test_a_stream_that_fails_after_its_head_ends_with_the_error(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where thoughts are counted in their text."""

    def fail(self: CompletionShape, choice: Any) -> bytes:
        raise APIError("the tokenizer fails on this input: x", status=400)

    monkeypatch.setattr(CompletionShape, "events", fail)
    live = start({"step_delay_s": 0.5})
    answer = live.post("/v1/completions", prompt=[5], max_tokens=900, ignore_eos=True, stream=True)
    assert answer.status_code == 200
    assert answer.text.count("the tokenizer fails on this input") == answer.text.count("[DONE]") == 1
    end = time.monotonic() + 10
    while (
        live.service.active and time.monotonic() < end
    ):  # the client has the answer before the server is through
        time.sleep(0.01)
    assert not live.service.active


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json does not exist.*--skip-tokenizer-init"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text((DATA / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json holds a list"):
        Tokenizer.load(tmp_path)


def test_template_extras() -> None:
    source = (
        "{% for m in messages %}\n    {%- if m.role == 'x' %}{{ raise_exception('no x') }}{% endif %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}\n{{ {'a': '<é>'} | tojson }}\n{% endfor %}\n"
        "{{ bos_token }}{{ strftime_now('%Y')|length }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"role": "user"}, {"role": "user"}]) == '{"a": "<é>"}\n<s>4'
    with pytest.raises(APIError, match="no x"):
        template.render([{"role": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ nope.nope }}"]
)
def test_the_sandbox_and_template_errors_are_400(source: str) -> None:
    with pytest.raises(APIError, match="the chat template refuses"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_kwargs_cannot_replace_the_messages() -> None:
    with pytest.raises(APIError, match="may not set messages"):
        ChatTemplate("x", {}).render([], kwargs={"messages": []})


def test_a_template_file_wins_and_lists_have_a_default(tmp_path: Path) -> None:
    named = {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}
    assert find_templates(tmp_path, named) == ("d", None)
    assert find_templates(tmp_path, {}) == (None, None)
    named["chat_template"].append({"name": "tool_use", "template": "u"})
    assert find_templates(tmp_path, named) == ("d", "u")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("file of tools")
    assert find_templates(tmp_path, {"chat_template": "d"}) == ("d", "file of tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_templates(tmp_path, named) == ("file", "file of tools")
    with pytest.raises(ModelFilesError, match="it must be a string"):
        find_templates(DATA, {"chat_template": 3})
    with pytest.raises(ModelFilesError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    assert SamplingDefaults.load(DATA) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text('{"top_p": 2}')
    with pytest.raises(ModelFilesError, match=r"generation_config\.json: top_p is 2"):
        SamplingDefaults.load(tmp_path)
    path.write_text('{"repetition_penalty": 1.05, "top_k": null, "description": "Small."}')
    loaded = SamplingDefaults.load(tmp_path)
    assert loaded == SamplingDefaults(repetition_penalty=1.05, description="Small.")
    assert loaded.params() == SamplingParams(repetition_penalty=1.05)


def test_chats_with_tools_have_a_template_of_their_own() -> None:
    template = ChatTemplate("plain {{ mood }}", {}, "{{ tools | length }} tools {{ place }}")
    chat = [{"role": "user", "content": "hi"}]
    assert template.render(chat, kwargs={"mood": "x"}) == "plain x"
    assert template.render(chat, tools=[{}, {}], kwargs={"place": "y"}) == "2 tools y"
    assert template.variables == {"mood", "place"}
    with pytest.raises(ModelFilesError, match="does not compile"):
        ChatTemplate("x", {}, "{% if %}")


def test_what_a_model_is_trained_on_is_marked_and_changes_no_prompt() -> None:
    source = (
        "{%- for m in messages %}{{- '<' + m.role + '>' }}{%- if m.role == 'assistant' %}{%- set n = 1 %}"
        "{%- generation %}{{- m.content }}{%- for c in 'ab' %}{{- loop.index + n }}{%- endfor %}{%- endgeneration %}"
        "{%- else %}{{- m.content }}{%- endif %}{%- endfor %}"
    )
    chat = [
        {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yo"), ("user", "?"))
    ]
    assert ChatTemplate(source, {}).render(chat) == "<user>hi<assistant>yo23<user>?"


PARTS = [{"type": "text", "text": "Hello wor"}, {"type": "text", "text": "ld"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{{ m.content }}", "Hello wor\nld"),
        ("{{ m.content | tojson }}", '"Hello wor\\nld"'),
        ("{{ m.content + '!' }}", "Hello wor\nld!"),
        ("{{ m.content if m.content is string else '' }}", "Hello wor\nld"),
        ("{% set c = m.content %}{% if c is string %}{{ c }}{% else %}{{ c[0].text + c[1].text }}{% endif %}",
         "Hello world"),
        ("{% if m.content is string %}x{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}",
         "Hello wor;ld;"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
def test_parts_are_put_together_as_the_template_does(content: str, said: str, role: str) -> None:
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{content}{{% endfor %}}"
    shown = "system" if role == "developer" else role
    assert ChatTemplate(source, {}).render([{"role": role, "content": PARTS}]) == f"<{shown}>{said}"


def test_each_role_has_its_own_way_with_parts() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}{% for m in messages %}"
        "{% if m.content is string or m.role != 'user' %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
        "{% endfor %}{% endif %}"
        "|{% endfor %}"
    )
    chat = [{"role": role, "content": PARTS} for role in ("user", "assistant", "user")]
    assert ChatTemplate(source, {}).render(chat) == "Hello world|Hello wor\nld|Hello world|"
