"""Streamed text is the whole text, however the ids and the text are cut."""

import random
from pathlib import Path

import pytest
import tokenizers

from openinfer.frontend.http.text.detokenizer import Detokenizer, StopStrings, TextDetokenizer
from openinfer.frontend.http.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DATA, vocab_size=1024)


def pieces(rng: random.Random, items: list[int]) -> list[list[int]]:
    out = []
    while items:
        size = rng.choice([1, 1, 1, 2, 3, 7])
        out.append(items[:size])
        items = items[size:]
    return out


def streamed(detokenizer: Detokenizer, chunks: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "text"])
def test_random_ids_streamed_equal_the_whole(tokenizer: Tokenizer, kind: str, skip: bool) -> None:
    rng = random.Random(7)
    for _ in range(400):
        ids = [rng.randrange(700) for _ in range(rng.randrange(1, 60))]
        if kind == "text" and _longest_broken_run(tokenizer, ids) >= 8:
            continue  # beyond what the window holds back
        detokenizer = (
            tokenizer.detokenizer(skip)
            if kind == "bytes"
            else TextDetokenizer(lambda ids: tokenizer.decode(ids, skip))
        )
        parts = streamed(detokenizer, pieces(rng, ids))
        assert "".join(parts) == tokenizer.decode(ids, skip)


def _longest_broken_run(tokenizer: Tokenizer, ids: list[int]) -> int:
    longest = run = 0
    for token_id in ids:
        run = run + 1 if "\ufffd" in tokenizer.token_text(token_id) else 0
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize("kind", ["bytes", "text"])
def test_no_half_characters(tokenizer: Tokenizer, kind: str) -> None:
    text = "żółć 漢字 👩‍👩‍👧 e\u0301 <think>x</think> ﷽"
    ids = tokenizer._core.encode(text).ids
    detokenizer = (
        tokenizer.detokenizer(False)
        if kind == "bytes"
        else TextDetokenizer(lambda ids: tokenizer.decode(ids, False))
    )
    parts = streamed(detokenizer, [[token_id] for token_id in ids])
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) == tokenizer.decode(ids, False)
    assert sum(bool(part) for part in parts) > 10


@pytest.mark.parametrize("kind", ["bytes", "text"])
def test_flush_shows_the_broken_end(tokenizer: Tokenizer, kind: str) -> None:
    first = tokenizer._core.encode("漢").ids[0]
    detokenizer = (
        tokenizer.detokenizer(False)
        if kind == "bytes"
        else TextDetokenizer(lambda ids: tokenizer.decode(ids, False))
    )
    assert detokenizer.push([first]) == ""
    assert detokenizer.flush() == tokenizer.decode([first], False)
    assert detokenizer.flush() == ""


def test_every_token_s_bytes_are_what_the_tokenizer_decodes(tokenizer: Tokenizer) -> None:
    for token_id in range(700):
        assert tokenizer.token_bytes(token_id).decode("utf-8", "replace") == tokenizer.token_text(token_id)


def test_ids_the_tokenizer_does_not_know_are_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.detokenizer(False).push([1023]) == ""
    assert tokenizer.detokenizer(False).push([10**6, 47, 10**6]) == "H"


def test_added_tokens_outside_the_byte_alphabet() -> None:
    core = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json"))
    core.add_tokens(["<｜begin▁of▁sentence｜>", "two words", "naïve"])
    tokenizer = Tokenizer(core, {})
    ids = [core.token_to_id(token) for token in ("<｜begin▁of▁sentence｜>", "two words", "naïve")]
    assert "".join(streamed(tokenizer.detokenizer(False), [ids])) == tokenizer.decode(ids, False)


def test_a_sentencepiece_tokenizer_keeps_its_spaces() -> None:
    vocabulary = {"<unk>": 0, "▁hello": 1, "▁world": 2, "!": 3, "<0xE6>": 4, "<0xBC>": 5, "<0xA2>": 6, "▁": 7}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    core.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(core, {})
    ids = [1, 2, 3, 4, 5, 6, 2, 7, 7, 1, 4, 5]
    parts = streamed(tokenizer.detokenizer(True), [[token_id] for token_id in ids])
    assert "".join(parts) == tokenizer.decode(ids, True)
    assert parts[:6] == ["hello", " world", "!", "", "", "漢"]


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Letter by letter, the obvious way."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_stop_strings_do_not_depend_on_the_cuts() -> None:
    rng = random.Random(3)
    matches = 0
    for _ in range(3000):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 30)))
        stops = [
            "".join(rng.choice("abc") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))
        ]
        include = rng.random() < 0.5
        watch = StopStrings(stops, include)
        out, matched, rest = "", None, text
        while rest and matched is None:
            size = rng.randrange(1, 8)
            new, matched = watch.push(rest[:size])
            out, rest = out + new, rest[size:]
        if matched is None:
            out += watch.flush()
        assert (out, matched) == oracle(text, stops, include)
        matches += matched is not None
    assert 500 < matches < 2900


def test_only_a_possible_stop_is_held_back() -> None:
    watch = StopStrings(["STOP"], False)
    assert watch.push("go S")[0] == "go "
    assert watch.push("T")[0] == ""
    assert watch.push("art")[0] == "START"[0:2] + "art"
    assert watch.push("x")[0] == "x"
