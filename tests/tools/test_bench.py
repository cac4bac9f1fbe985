"""`radixkv bench` against a server that answers at once and says what it was asked."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Handler(BaseHTTPRequestHandler):
    """Streams as many words as tokens are asked for; half of each prompt is said to be cached."""

    requests: list[dict[str, Any]]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send([json.dumps({"data": [{"id": "tiny"}]})], "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(body)
        tokens, prompt = body["max_tokens"], len(body["prompt"].split())
        events: list[dict[str, Any]] = [{"choices": [{"text": "w "}]} for _ in range(tokens)]
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        details = {"prompt_tokens_details": {"cached_tokens": prompt // 2}}
        events.append({"choices": [], "usage": {**usage, **details}})
        self._send([*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"])

    def _send(self, parts: list[str], kind: str = "text/event-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode())


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Recording", (Handler,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", handler.requests
        running.shutdown()
        thread.join()


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "radixkv", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_workloads_are_run_and_reported(server, tmp_path):
    url, requests = server
    done = bench("--url", url, "--workloads", "single, W1 warm", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    asked = [request for request in requests if len(request["prompt"].split()) > 100]
    assert len(asked) == 4 + 24
    assert {request["max_tokens"] for request in asked} == {32}
    assert {request["model"] for request in asked} == {"tiny"}
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(result["medians"]) == {"single", "W1 warm"}
    figures = result["medians"]["W1 warm"]
    prompts = [len(r["prompt"].split()) for r in asked if len(r["prompt"].split()) > 1000]
    assert figures["prompt_tokens"] == sum(prompts)
    assert figures["cached_tokens"] == sum(length // 2 for length in prompts)
    assert figures["output_tokens_per_s"] == pytest.approx(24 * 32 / figures["wall_s"])
    assert "single" in done.stdout


def test_rounds_have_new_prompts_of_the_same_seed(server):
    url, requests = server
    assert bench("--url", url, "--workloads", "single", "--rounds", "2").returncode == 0
    first = [request["prompt"] for request in requests if len(request["prompt"].split()) > 100]
    assert len(set(first)) == 8
    requests.clear()
    assert bench("--url", url, "--workloads", "single", "--seed", "1").returncode == 0
    assert [r["prompt"] for r in requests if len(r["prompt"].split()) > 100] == first[4:]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--workloads", "W9"), "W9"),
        (("--url", "http://127.0.0.1:1", "--", "--block-size", "16"), "--url"),
        (("--url", "http://127.0.0.1:1"), "http://127.0.0.1:1"),
    ],
)
def test_mistakes_are_one_paragraph(arguments, part):
    done = bench(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert part in done.stderr
