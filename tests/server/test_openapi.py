# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document: it names what is served and how it fails, and requests made from it get no 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

schemathesis = pytest.importorskip("schemathesis")

from fuzz_api import fuzz  # noqa: E402


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(max_model_len=512, caches=True)) as running:
        yield running


def test_every_route_that_reads_a_body_says_so(server: LiveServer) -> None:
    with server.http() as client:
        document = client.get("/openapi.json").json()
        ends = {"/v1/responses/{response_id}/cancel", "/v1/batches/{batch_id}/cancel"}
        updates = ("/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine")
        pauses = ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache")
        silent = {"/v1/embeddings", "/v1/cache/reset", *ends, *updates, *pauses}
        for path, operations in document["paths"].items():
            assert ("requestBody" in operations.get("post", {})) == (
                "post" in operations and path not in silent
            )
            for operation in operations.values():
                assert "default" in operation["responses"]
        assert document["openapi"].startswith("3.1")


def test_errors_are_described_in_the_dialect_of_the_path(server: LiveServer) -> None:
    with server.http() as client:
        document = client.get("/openapi.json").json()
        for path in ("/v1/messages", "/v1/completions", "/v1/responses"):
            answer = client.post(path, json={"no": "such field"}).json()
            content = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]
            schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
            assert set(schema["required"]) == set(answer)
            assert set(schema["properties"]["error"]["required"]) == set(answer["error"])


def test_hundreds_of_generated_requests_get_no_5xx(server: LiveServer) -> None:
    """`make fuzz` sends ten thousand."""
    statuses = fuzz(server.url, 120)
    assert statuses.total() >= 120
    generated = {
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "POST /v1/messages",
    }
    for label in generated:
        assert statuses[label, 200] >= 3, f"too few requests got past the checks: {statuses}"
