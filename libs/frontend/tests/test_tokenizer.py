"""Tokenizer and chat template against goldens made with the reference library."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from openinfer.frontend.chat_template import ChatTemplate, find_template
from openinfer.frontend.errors import APIError, ModelFilesError
from openinfer.frontend.http.params import SamplingDefaults
from openinfer.frontend.http.text.tokenizer import Tokenizer

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
    source = find_template(DATA, tokenizer.config)
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
    assert asyncio.run(tokenizer.encode(text, True)) == tokenizer._core.encode(text).ids


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
    assert find_template(tmp_path, named) == "d"
    assert find_template(tmp_path, {}) is None
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path, named) == "file"
    with pytest.raises(ModelFilesError, match="it must be a string"):
        find_template(DATA, {"chat_template": 3})
    with pytest.raises(ModelFilesError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    assert SamplingDefaults.load(DATA) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text('{"top_p": 2}')
    with pytest.raises(ModelFilesError, match=r"generation_config\.json: top_p is 2"):
        SamplingDefaults.load(tmp_path)
    path.write_text('{"repetition_penalty": 1.05, "top_k": null}')
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults(repetition_penalty=1.05)
