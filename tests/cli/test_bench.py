# SPDX-License-Identifier: Apache-2.0
"""`radixkv bench` against a server that answers at once and says what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from radixkv.cli.bench.agent_jobs import AgentJob, AgentTurn
from radixkv.cli.bench.agent_loop import AgentLoop
from radixkv.cli.bench.load import Load
from radixkv.cli.bench.load_report import figures
from radixkv.cli.bench.scenarios import arrivals, make_sessions
from radixkv.cli.main import main


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


@pytest.mark.nightly
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
def test_mistakes_are_one_paragraph(arguments, part, monkeypatch, capfd):
    assert part in refused(monkeypatch, capfd, *arguments)


def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command writes of a mistake; it runs in this process, to save starting another."""
    monkeypatch.setattr(sys, "argv", ["radixkv", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    return errors


# ---------------------------------------------------------------------- loads


class Chat(BaseHTTPRequestHandler):
    """Chat completions after `delay` seconds, one at a time if `serial`."""

    delay, serial = 0.0, False
    requests: list[dict[str, Any]]
    lock: threading.Lock

    log_message = Handler.log_message
    do_GET = Handler.do_GET
    _send = Handler._send

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(body)
        if any(message["content"] == "fail" for message in body["messages"]):
            self.send_error(500)
            return
        with self.lock if self.serial else contextlib.nullcontext():
            threading.Event().wait(self.delay)
        size = sum(len(message["content"].split()) for message in body["messages"])
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": word}}]} for word in ("hello ", "world")
        ]
        usage = {"prompt_tokens": size, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
        events.append({"choices": [], "usage": usage})
        self._send([*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"])


@contextlib.contextmanager
def chat_server(**options: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    members = {"requests": [], "lock": threading.Lock(), **options}
    handler = type("RecordingChat", (Chat,), members)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", handler.requests
        running.shutdown()
        thread.join()


def test_waiting_counts_from_when_a_request_was_due() -> None:
    """Ten requests at once to a server that takes them one by one: the last waited for all before."""
    with chat_server(delay=0.05, serial=True) as (url, _):
        sessions = make_sessions("unique", count=10, rate=0, seed=1, max_tokens=2, turns=1, shared_words=5)
        outcomes = asyncio.run(Load(url, "tiny").run(sessions))
    found = figures(outcomes)
    assert found["ttft_s"]["max"] >= 10 * 0.05
    assert found["ttft_s"]["p50"] >= 4 * 0.05
    assert found["sent_late_s"]["max"] < found["ttft_s"]["max"]
    assert found["output_tokens"] == 20
    assert found["hit_rate"] == 10 / 50


@pytest.mark.nightly
def test_turns_repeat_the_answers_before(tmp_path: Any) -> None:
    target = tmp_path / "load.json"
    with chat_server() as (url, requests):
        done = bench(
            "--url",
            url,
            "--load",
            "agent",
            "--sessions",
            "3",
            "--turns",
            "4",
            "--rate",
            "0",
            "--prompt-words",
            "20",
            "--json",
            str(target),
        )
    assert done.returncode == 0, done.stderr
    assert "12 requests" in done.stdout
    assert len(requests) == 12
    longest = max(requests, key=lambda body: len(body["messages"]))["messages"]
    roles = [message["role"] for message in longest]
    assert roles == ["system", *["user", "assistant"] * 3, "user"]
    assert longest[2]["content"] == "hello world"
    assert len({body["messages"][0]["content"] for body in requests}) == 1, "one system prompt for all"
    report = json.loads(target.read_text())
    assert report["settings"]["turns"] == 4
    assert len(report["requests"]) == 12
    assert report["figures"]["failed"] == {}
    assert set(report["figures"]["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99", "max"}


@pytest.mark.nightly
def test_a_log_is_replayed_at_its_own_times(tmp_path: Any) -> None:
    log = tmp_path / "log.jsonl"
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}], "timestamp": 100.0 + at}
        for text, at in (("one", 0.0), ("two", 3.0), ("fail", 1.0))
    ]
    lines[0]["max_tokens"] = 5
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target = tmp_path / "load.json"
    with chat_server() as (url, requests):
        arguments = ["--url", url, "--load", "replay", "--log", str(log), "--speed", "10"]
        done = bench(*arguments, "--json", str(target))
    assert done.returncode == 0, done.stderr
    assert "failed: 1 x HTTP 500" in done.stdout
    report = json.loads(target.read_text())
    assert [round(request["due_s"], 3) for request in report["requests"]] == [0.0, 0.1, 0.3]
    for request in report["requests"]:
        assert request["sent_s"] >= request["due_s"]
    assert [body["messages"][0]["content"] for body in requests] == ["one", "fail", "two"]
    assert [body["max_tokens"] for body in requests] == [5, 32, 32]


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(10.0, 2000, seed=3))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times == sorted(times)
    assert 0.09 < statistics.mean(gaps) < 0.11
    assert 0.09 < statistics.pstdev(gaps) < 0.11, "as wide as its mean: exponential"
    assert times == list(arrivals(10.0, 2000, seed=3))
    assert list(arrivals(0, 3, seed=3)) == [0.0] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agents", "--kind", "storm"], "known: agents, swe, chat"),
        (["agents", "--load", "shared"], "without --load"),
        (["--load", "storm"], "known: shared, agent, unique, replay"),
        (["--load", "replay"], "--log FILE go together"),
        (["--load", "shared", "--log", "x.jsonl"], "go together"),
        (["--load", "shared", "--workloads", "W3"], "exclude each other"),
        (["--load", "replay", "--log", "/no/such/log.jsonl"], "/no/such/log.jsonl"),
        (["--load", "shared", "--json", "/no/such/folder/x"], "there is no folder"),
    ],
)
def test_mistakes_in_loads(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert message in refused(monkeypatch, capfd, "--url", "http://127.0.0.1:9", *arguments)


def test_agents_ask_in_closed_loops_and_fork_and_compact() -> None:
    sub_agent = (AgentTurn(3, 2, 0.0), AgentTurn(3, 2, 0.0))
    turns = (AgentTurn(4, 2, 0.0, forks=(sub_agent,)), AgentTurn(4, 2, 0.0, compact_to=6))
    jobs = [AgentJob("test", 0, 10, 20, turns), AgentJob("test", 0, 10, 20, turns[:1])]
    with chat_server() as (url, requests):
        loop = AgentLoop(url, "tiny")
        loop.say_done = True
        answers = asyncio.run(loop.run_jobs(jobs, seed=3))
    said = [body.get("radixkv") for body in requests]
    assert said.count({"session_done": True}) == 4, "the last one of each agent and sub-agent"
    assert said.count(None) == 3
    assert len(answers) == len(requests) == sum(job.num_requests for job in jobs) == 7
    assert len({body["messages"][0]["content"] for body in requests}) == 1, "one system prompt for the group"
    sizes = sorted(answer.prompt_tokens for answer in answers)
    assert sizes == sorted([34, 34, 10 + 6 + 4, 34 + 2 + 3, 34 + 2 + 3, 39 + 2 + 3, 39 + 2 + 3])
    later = [answer for answer in answers if answer.prompt_tokens in (39, 44)]
    assert {answer.new_tokens for answer in later} == {3}


def test_the_command_for_agents_tells_their_figures(tmp_path: Any) -> None:
    target = tmp_path / "agents.json"
    with chat_server() as (url, requests):
        done = bench(
            *("agents", "--url", url, "--kind", "one-shot", "--agents", "3"),
            *("--scale", "0.01", "--say-done", "--json", str(target)),
        )
    assert done.returncode == 0, done.stderr
    assert [body["radixkv"] for body in requests] == [{"session_done": True}] * 3
    assert "computed over first time" in done.stdout
    report = json.loads(target.read_text())
    assert report["figures"]["turns"] == len(requests) == 3
    assert report["settings"]["kind"] == "one-shot"
