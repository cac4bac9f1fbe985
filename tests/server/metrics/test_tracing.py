# SPDX-License-Identifier: Apache-2.0
"""Traces: what an OpenTelemetry collector gets of a request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from live_server import live_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from scripted_engine import ScriptedEngine

from radixkv.errors import ConfigError
from radixkv_server.app import create_app, make_settings

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes spans as OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    def value(item: Any) -> Any:
        kind = item.WhichOneof("value")
        return [value(v) for v in item.array_value.values] if kind == "array_value" else getattr(item, kind)

    return {pair.key: value(pair.value) for pair in span.attributes}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_below_its_callers(collector: Collector, stream: bool) -> None:
    engine = ScriptedEngine()
    with live_server(engine, otlp_traces_endpoint=collector.url) as server:
        body = {"messages": [{"role": "user", "content": "say:hello"}], "stream": stream}
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers)
        httpx.post(server.url + "/v1/completions", json={"prompt": "say:x", "n": 2})
        httpx.get(server.url + "/health")
        num_prompt_tokens = len(engine.requests[0].prompt)
    # The server has ended and has sent what was left.
    chat, text = sorted((span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER), key=str)[:2]
    if not chat.name.startswith("chat"):
        chat, text = text, chat
    assert chat.name == f"chat {engine.model_name}"
    assert text.name == f"text_completion {engine.model_name}"
    assert chat.trace_id.hex() == TRACE_ID
    assert chat.parent_span_id.hex() == PARENT_ID
    assert text.trace_id.hex() != TRACE_ID
    values = attributes(chat)
    assert values["gen_ai.operation.name"] == "chat"
    assert values["gen_ai.usage.input_tokens"] == num_prompt_tokens
    assert values["gen_ai.usage.cache_read.input_tokens"] == num_prompt_tokens // 2
    assert values["gen_ai.usage.output_tokens"] == 6
    assert values["gen_ai.response.finish_reasons"] == ["stop"]
    assert values["http.route"] == "/v1/chat/completions"
    assert values["http.response.status_code"] == 200
    assert values["radixkv.request_id"] == answer.headers["x-request-id"]
    assert 0 <= values["gen_ai.server.time_to_first_token"] < 60
    assert attributes(text)["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    phases = [span for span in collector.spans if span.parent_span_id == chat.span_id]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    for span in phases:
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= chat.end_time_unix_nano
    assert len(collector.spans) == 8, "two requests with three phases each; /health is not traced"


def test_a_failed_request_is_an_error(collector: Collector) -> None:
    engine = ScriptedEngine(fail=lambda asked, given: "error" if given == 1 else None)
    with live_server(engine, otlp_traces_endpoint=collector.url) as server:
        httpx.post(server.url + "/v1/completions", json={"prompt": "say:hello"})
    span = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes(span)["http.response.status_code"] == 500


def test_an_address_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="http"):
        create_app(ScriptedEngine(), make_settings(otlp_traces_endpoint="collector:4317"))
