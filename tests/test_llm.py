"""LLM: a model in this process, text in, text out."""

from __future__ import annotations

import json
import math
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_lora import ADAPTERS, weights_of, write_adapter

from openinfer.llm import LLM, Grammar, PromptRefused, SamplingParams
from openinfer.recipes.engine import Recipe
from openinfer.tensor import DriverNotFound

GREEDY = SamplingParams(temperature=0)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SPAIN = [{"role": "user", "content": "What is the capital of Spain?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo/qwen3", device="cpu", kv_cache_memory_bytes=64 << 20) as made:
        yield made


def test_a_chat_is_answered_whether_it_comes_alone_or_with_others(llm: LLM) -> None:
    (alone,) = llm.chat(FRANCE, GREEDY)
    assert alone.text.endswith("The capital of France is Paris.")
    assert alone.finish_reason == "stop"
    together = llm.chat([SPAIN, FRANCE], GREEDY)
    assert together[1] == alone
    assert "Madrid" in together[0].text


def test_options_of_the_template_are_passed_on(llm: LLM) -> None:
    (answer,) = llm.chat(FRANCE, GREEDY, template_kwargs={"enable_thinking": False})
    assert answer.text == "The capital of France is Paris."


def test_pieces_of_a_stream_add_up_to_the_answer(llm: LLM) -> None:
    pieces = list(llm.stream(FRANCE, GREEDY))
    assert len(pieces) > 5
    assert "".join(pieces) == llm.chat(FRANCE, GREEDY)[0].text


def test_a_stream_that_is_closed_leaves_the_engine_to_others(llm: LLM) -> None:
    stream = llm.stream(FRANCE, GREEDY)
    first = next(stream)
    between = llm.chat(SPAIN, GREEDY)[0].text  # while the stream is open
    second = next(stream)
    assert llm.chat(FRANCE, GREEDY)[0].text.startswith(first + second)
    stream.close()  # type: ignore[attr-defined]
    assert llm.chat(SPAIN, GREEDY)[0].text == between


def test_a_model_that_is_closed_gives_the_blocks_of_open_streams_back() -> None:
    with LLM("demo/qwen3", device="cpu", kv_cache_memory_bytes=64 << 20) as made:
        open_streams = [made.stream(prompt, GREEDY) for prompt in (FRANCE, SPAIN)]
        assert all(map(next, open_streams))
        pool = made._engine.pool
        assert pool.num_free < pool.num_total
    assert pool.num_free == pool.num_total


def test_limits_and_stop_strings_end_an_answer(llm: LLM) -> None:
    prompt = "The capital of France is"
    (answer,) = llm.generate(prompt, GREEDY, max_tokens=1)
    assert (len(answer.token_ids), answer.finish_reason) == (1, "length")
    (stopped,) = llm.chat(FRANCE, GREEDY, stop=["Par"])
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith("The capital of France is ")


def test_progress_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["One", "Two"], GREEDY, max_tokens=2, progress=True)
    assert "generating  2/2 prompts" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit_is_refused_before_any_runs(llm: LLM) -> None:
    with pytest.raises(PromptRefused, match="prompt 1 has 0 tokens"):
        llm.generate(["One", ""])
    with pytest.raises(PromptRefused, match=r"prompt 0 has .* tokens; 1 to"):
        llm.generate("word " * 4096)
    assert llm.generate("One", GREEDY, max_tokens=1)


def test_an_unknown_flag_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(TypeError, match=r"max_model_length: the engine's flags are .*max_model_len"):
        LLM("demo/qwen3", max_model_length=9)


def test_it_works_in_a_thread_where_no_event_loop_is(llm: LLM) -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(llm.chat(FRANCE, GREEDY)[0].text))
    thread.start()
    thread.join()
    assert "Paris" in found[0]


def test_log_probabilities_come_with_the_tokens(llm: LLM) -> None:
    (plain,) = llm.chat(FRANCE, GREEDY)
    (answer,) = llm.chat(FRANCE, SamplingParams(temperature=0, logprobs=3), stop=["Par"])
    assert plain.logprobs is None
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, one in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token == one.top_token_ids[0]  # greedy
        assert one.logprob == one.top_logprobs[0] <= 0
        assert sum(map(math.exp, one.top_logprobs)) <= 1.001
    (own,) = llm.generate("The", SamplingParams(temperature=0, logprobs=0), max_tokens=2)
    assert [one.top_token_ids for one in own.logprobs or ()] == [[], []]
    with pytest.raises(PromptRefused, match="logprobs: stream yields text"):
        next(llm.stream(FRANCE, SamplingParams(logprobs=1)))


def test_an_answer_has_the_form_of_its_grammar(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    forms = [
        Grammar.of_schema(schema),
        Grammar("choice", json.dumps(["yes", "no"])),
        Grammar("regex", "[ab]{3}"),
    ]
    for _ in range(2):  # the engine has the tokens from the first on
        texts = [llm.chat(FRANCE, GREEDY, grammar=form, max_tokens=40)[0].text for form in forms]
        assert json.loads(texts[0]).keys() == {"n"}
        assert texts[1] in ("yes", "no")
        assert len(texts[2]) == 3
        assert set(texts[2]) <= set("ab")
    assert "".join(llm.stream(FRANCE, GREEDY, grammar=forms[2])) == texts[2]
    with pytest.raises(PromptRefused, match="regex"):
        llm.generate("a", grammar=Grammar("regex", "(?=a)"))


def test_an_adapter_is_honoured_or_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    path = "demo/qwen3"
    write_adapter(weights_of(Path(path)), tmp_path / "own", *ADAPTERS["all"], seed=3)
    flags: dict[str, Any] = {"enable_lora": True, "lora_modules": [f"own={tmp_path / 'own'}"]}
    with LLM(path, device="cpu", kv_cache_memory_bytes=64 << 20, **flags) as adapted:
        (other,) = adapted.generate("The capital", GREEDY, max_tokens=8, adapter="own")
        (plain,) = adapted.generate("The capital", GREEDY, max_tokens=8)
        with pytest.raises(PromptRefused, match="none"):
            adapted.generate("The", adapter="none")
    assert plain == llm.generate("The capital", GREEDY, max_tokens=8)[0]
    assert plain.token_ids != other.token_ids
    with pytest.raises(PromptRefused, match="no adapters; start it with --enable-lora"):
        llm.generate("The", adapter="own")


@pytest.mark.parametrize(
    ("device", "flags", "sizes"),
    [
        ("cuda", {}, (512, 4096)),
        ("cuda", {"max_num_seqs": 8}, (8, None)),
        ("cpu", {}, (256, None)),
        ("auto", {}, (256, None)),
    ],
)
def test_batches_have_longer_steps_where_a_gpu_is(
    device: str, flags: dict[str, int], sizes: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def engine_spec(recipe: Any, folder: Path, args: Namespace) -> None:
        raise Asked(args.max_num_seqs, args.max_num_batched_tokens)

    def without_a_driver(kind: str, index: int) -> None:
        raise DriverNotFound

    monkeypatch.setattr(Recipe, "engine_spec", engine_spec)
    monkeypatch.setattr("openinfer.llm.Device", without_a_driver)
    with pytest.raises(Asked) as found:
        LLM("demo/qwen3", device=device, **flags)
    assert found.value.args == sizes
