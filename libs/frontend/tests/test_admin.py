"""The endpoints for the people who run the server."""

from typing import Any

import pytest


def test_traces_want_the_key_and_are_empty_where_nothing_was_slow(start: Any) -> None:
    live = start(app={"api_key": "s3cret"})
    assert live.http.get("/debug/traces").status_code == 401
    answer = live.http.get("/debug/traces", headers={"authorization": "Bearer s3cret"})
    assert answer.status_code == 200
    assert answer.json() == {"found": 0, "traces": []}


@pytest.mark.attack
@pytest.mark.parametrize(
    "level", ["\u00b2", "\u0661", "9" * 30, "9" * 5000, "-1", "+1", "1.0", "1_0", "", " 1", "true"]
)
def test_levels_that_are_no_number_are_400(start: Any, level: str) -> None:
    live = start()
    assert live.http.post("/sleep", params={"level": level}).status_code == 400
    if level not in (" 1", "1.0"):  # in a body they are 1, as many clients write
        assert live.http.post("/sleep", json={"level": level}).status_code == 400
    assert not live.driver.stats().asleep


@pytest.mark.attack
@pytest.mark.parametrize(
    "level", ["10000000000000000000000000", "18446744073709551616", "-1", "1e300", "null", "[1]", "1.5"]
)
def test_levels_beyond_bounds_are_400(start: Any, level: str) -> None:
    answer = start().http.post("/sleep", content=f'{{"level": {level}}}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "level")


@pytest.mark.parametrize("body", ["", "{}", '{"level": 1}'])
def test_a_body_of_sleep_may_be_empty(start: Any, body: str) -> None:
    live = start()
    assert live.http.post("/sleep", content=body).json() == {"is_sleeping": True}
    assert live.http.post("/wake_up", content=body).json() == {"is_sleeping": False}
    assert live.http.post("/wake_up", content="[1]").status_code == 400
