"""OpenTelemetry spans of finished sequences: queue, prefill, decode, under the caller's W3C trace. Needs [otel]."""

import time

from openinfer.frontend.contract import Request
from openinfer.frontend.errors import MissingExtraError

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingExtraError(f"tracing ({error.name} is missing)", "otel") from error


class Tracing:
    """Sends spans to an exporter, from a thread of its own."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        resource = Resource.create({"service.name": "openinfer"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("openinfer.frontend")
        self._model = model

    @classmethod
    def to(cls, endpoint: str, model: str) -> "Tracing":
        """endpoint: such as http://localhost:4318/v1/traces."""
        return cls(OTLPSpanExporter(endpoint), model)

    def finished(
        self, request: Request, reason: str, tokens: int, times: tuple[float, float, float], problem: str
    ) -> None:
        """One sequence ended. times: metrics.Times. problem: of the span, if not empty."""
        scheduled, first, last = times
        epoch = time.time() - time.monotonic()
        carrier = {"traceparent": request.trace_parent} if request.trace_parent else {}
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(request.arrival + epoch),
            attributes={
                "gen_ai.response.model": self._model,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
                "gen_ai.usage.completion_tokens": tokens,
                "gen_ai.response.finish_reasons": [reason],
            },
        )
        if problem:
            span.set_status(StatusCode.ERROR, problem)
        context = set_span_in_context(span)
        phases = (
            ("queue", request.arrival, scheduled),
            ("prefill", scheduled, first),
            ("decode", first, last),
        )
        for name, begin, end in phases:
            if begin and end:
                phase = self._tracer.start_span(name, context=context, start_time=_nanoseconds(begin + epoch))
                phase.end(_nanoseconds(end + epoch))
        span.end(_nanoseconds((last or time.monotonic()) + epoch))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
