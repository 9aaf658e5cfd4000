"""LLM: a model in this process, text in, text out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from openinfer.llm import LLM, PromptRefused, SamplingParams

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
