"""The endpoints for the people who run the server."""

from typing import Any


def test_traces_want_the_key_and_are_empty_where_nothing_was_slow(start: Any) -> None:
    live = start(app={"api_key": "s3cret"})
    assert live.http.get("/debug/traces").status_code == 401
    answer = live.http.get("/debug/traces", headers={"authorization": "Bearer s3cret"})
    assert answer.status_code == 200
    assert answer.json() == {"found": 0, "traces": []}
