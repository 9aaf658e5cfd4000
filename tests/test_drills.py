"""Drills on a real engine: what one client can do to another. Figures are printed (`pytest -s`) for docs/faults.md."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest


def post(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json={"ignore_eos": True, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def with_ageing(start: Callable[..., Any], tiny: Any, ageing_s: float) -> str:
    """The URL of a server of two rows. The tests of the quick suite share one."""
    policy = f"priority,ageing_s={ageing_s}"
    return str(start(tiny.path, "--max-num-seqs", "2", "--scheduling-policy", policy).url)


@pytest.mark.parametrize("ageing_s", [0.2, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_stream_of_urgent_requests_starves_no_other(
    tiny: Any, start: Callable[..., Any], ageing_s: float
) -> None:
    url = with_ageing(start, tiny, ageing_s)
    over, served = threading.Event(), [0]

    def flood() -> None:
        while not over.is_set():
            post(url, prompt=[5, 6, 7], max_tokens=8, priority=-4)
            served[0] += 1

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    while served[0] < 16:  # each thread has a request under way: four wait for each row all the time
        time.sleep(0.01)
    for _ in range(8):  # where the clients are slower than the server, few wait
        began, before = time.monotonic(), served[0]
        post(url, prompt=[5, 6, 7], max_tokens=8, priority=4)
        waited, ahead = time.monotonic() - began, served[0] - before
        if ahead > 8:
            break
    over.set()
    for thread in threads:
        thread.join()
    print(f"8 levels less urgent: {waited:.2f} s, {ahead} urgent requests went ahead")
    assert ahead > 8  # urgent ones do go ahead


def salted(url: str, prompts: int) -> dict[str, list[float]]:
    """Seconds of requests for prompts of 480 tokens under four salts. Only the salt of the first finds it cached."""
    times: dict[str, list[float]] = {"new": [], "same salt": [], "other salt": [], "no salt": []}
    for index in range(prompts):
        prompt = [300 + (7 * index + step * step) % 200 for step in range(480)]
        for name, salt in (("new", "a"), ("same salt", "a"), ("other salt", f"b{index}"), ("no salt", None)):
            began = time.monotonic()
            body = post(url, prompt=prompt, max_tokens=1, cache_salt=salt)
            times[name].append(time.monotonic() - began)
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 400) == (name == "same salt"), name
            assert cached in (0, 464), name
    return times


def test_other_salts_have_every_token_to_compute(tiny: Any, start: Callable[..., Any]) -> None:
    """As many tokens as a new prompt has: so the time that it takes tells nothing."""
    salted(with_ageing(start, tiny, 0.2), 2)


@pytest.mark.slow
def test_how_long_a_prompt_takes_tells_nothing_about_other_salts(
    tiny: Any, start: Callable[..., Any]
) -> None:
    times = salted(start(tiny.path, "--max-num-seqs", "4").url, 7)
    medians = {name: statistics.median(found) for name, found in times.items()}
    print({name: f"{seconds * 1e3:.1f} ms" for name, seconds in medians.items()})
    assert medians["same salt"] < 0.7 * medians["new"]
    for name in ("other salt", "no salt"):
        assert 0.6 < medians[name] / medians["new"] < 1.6
