# SPDX-License-Identifier: Apache-2.0
"""Tracing: OpenTelemetry traces of generation requests, by the conventions for generative AI.

Each request has a span, a child of the span in its `traceparent` header, with a child for each of its phases:
queue, prefill, decode. Spans are made at the end of the request, from times that are measured anyway.

Conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ (in development).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError
from radixkv_server.generation.progress import Usage
from radixkv_server.http.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_NS = 1_000_000_000


class Tracing:
    """Sends spans to an exporter, in batches, from a thread of its own.

    Args:
        exporter: destination; see `otlp_exporter`.
        model: name of the served model.

    Raises:
        ConfigError: OpenTelemetry's SDK is not installed.
    """

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        try:  # an optional extra
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise _not_installed() from None
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes on top.
        resource = Resource({"service.name": "radixkv"}).merge(Resource.create())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("radixkv")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def request_ended(self, scope: Scope, route: str, record: RequestRecord) -> None:
        """Trace a request that has ended, if it generated anything."""
        if record.operation is None:
            return
        # An optional extra, which is there if this object is.
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        wall = time.time() - time.monotonic()
        span = self._tracer.start_span(
            f"{record.operation} {record.adapter or self._model}",
            context=self._propagator.extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            attributes=self._attributes(scope, route, record),
            start_time=int((wall + record.started) * _NS),
        )
        if record.failed or record.status is None or record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        inside = set_span_in_context(span)
        for name, start, end in _phases(record.usage):
            child = self._tracer.start_span(name, context=inside, start_time=int((wall + start) * _NS))
            child.end(int((wall + end) * _NS))
        span.end(int((wall + time.monotonic()) * _NS))

    def close(self) -> None:
        """Send the waiting spans; blocks for some seconds at most."""
        self._provider.shutdown()

    def _attributes(self, scope: Scope, route: str, record: RequestRecord) -> dict[str, Any]:
        usage = record.usage
        values: dict[str, Any] = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": "radixkv",
            "gen_ai.request.model": record.adapter or self._model,
            "gen_ai.response.model": record.adapter or self._model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.cache_write.input_tokens": usage.cache_write_tokens,
            "http.request.method": scope["method"],
            "http.route": route,
            "radixkv.request_id": record.request_id,
        }
        if usage.finish_reasons:
            values["gen_ai.response.finish_reasons"] = usage.finish_reasons
        if record.status is not None:
            values["http.response.status_code"] = record.status
        if record.error_code:
            values["error.type"] = record.error_code
        if record.tenant:
            values["radixkv.tenant"] = record.tenant
        first_at = usage.prompts[0].first_token_at if usage.prompts else None
        if first_at is not None:
            values["gen_ai.server.time_to_first_token"] = max(0.0, first_at - record.started)
        return values


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Make an exporter that sends spans as OTLP over HTTP, for example to `http://host:4318/v1/traces`.

    Raises:
        ConfigError: OpenTelemetry's SDK or its exporter is not installed, or the address is malformed.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_traces_endpoint must be an http(s) address, not {endpoint!r}")
    try:  # an optional extra
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise _not_installed() from None
    return OTLPSpanExporter(endpoint=endpoint)


def _not_installed() -> ConfigError:
    return ConfigError(f"traces need OpenTelemetry's SDK: {install_command('otel')}")


def _phases(usage: Usage) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the first prompt's phases, in seconds of the monotonic clock."""
    if not usage.prompts or usage.prompts[0].times is None:
        return []
    times, arrived_at = usage.prompts[0].times, usage.prompts[0].arrived_at
    marks = [0.0, times.first_scheduled, times.first_token, times.finished]
    return [
        (name, arrived_at + start, arrived_at + max(start, end))
        for name, start, end in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False)
        if start is not None and end is not None
    ]
