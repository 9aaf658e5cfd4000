"""Spans: one a sequence, its phases inside, under the caller's trace."""

import time
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from openinfer.frontend.http.admin.tracing import Tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_spans_of_a_request(start: Any) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "fake")
    live = start(app={"tracing": tracing})
    body = {"prompt": [5, 6], "max_tokens": 5, "ignore_eos": True, "n": 2}
    for given in (f"00-{TRACE}-b7ad6b7169203331-01", "nonsense"):
        assert live.http.post("/v1/completions", json=body, headers={"traceparent": given}).status_code == 200
    tracing.close()
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted(["llm_request", "queue", "prefill", "decode"] * 4)
    requests = [span for span in spans if span.name == "llm_request"]
    traced = [span for span in requests if span.parent is not None]
    assert [f"{span.context.trace_id:032x}" for span in traced] == [TRACE] * 2
    assert [f"{span.parent.span_id:x}" for span in traced if span.parent] == ["b7ad6b7169203331"] * 2
    for span in requests:
        assert span.attributes is not None
        assert span.attributes["gen_ai.usage.prompt_tokens"] == 2
        assert span.attributes["gen_ai.usage.completion_tokens"] == 5
        inside = [one for one in spans if one.parent and one.parent.span_id == span.context.span_id]
        times = [(one.start_time, one.end_time) for one in inside]
        assert [one.name for one in inside] == ["queue", "prefill", "decode"]
        assert times[0][0] == span.start_time
        assert times[2][1] == span.end_time
        assert all(begin is not None and end is not None and begin <= end for begin, end in times)


def test_a_sequence_that_did_not_end_well_has_a_span_too(start: Any) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "fake")
    live = start({"fail_prompt": 9, "max_model_len": 4096, "step_delay_s": 0.005}, app={"tracing": tracing})
    assert live.post("/v1/completions", prompt=[9], max_tokens=5).status_code == 500
    assert live.post("/v1/completions", prompt=[5], max_tokens=5, priority=1).status_code == 400
    with live.http.stream(
        "POST", "/v1/completions", json={"prompt": [5], "max_tokens": 4000, "stream": True}
    ) as left:
        next(left.iter_lines())
    deadline = time.monotonic() + 10
    while live.service.active and time.monotonic() < deadline:
        time.sleep(0.005)
    tracing.close()
    requests = {
        span.attributes["gen_ai.response.finish_reasons"][0]: span
        for span in exporter.get_finished_spans()
        if span.name == "llm_request" and span.attributes is not None
    }
    assert requests.keys() == {"error", "rejected", "abort"}
    assert requests["error"].status.description == "this prompt fails, as asked"
    assert "priority 1 is not supported" in (requests["rejected"].status.description or "")
    assert requests["abort"].status.is_ok or requests["abort"].status.is_unset
    assert requests["abort"].attributes["gen_ai.usage.completion_tokens"] > 0
