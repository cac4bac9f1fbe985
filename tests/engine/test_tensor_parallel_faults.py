# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed or hangs under live HTTP requests: they are told, and the engine comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import LiveServer, live_server
from tiny_models import save_tiny_model

from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

pytestmark = pytest.mark.injects_faults

BODY = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0}
RANKS = "radixkv.model.parallel.worker"
MANY_TOKENS = 4000


def ranks(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of the ranks after the first."""
    found = []
    for child in (process or psutil.Process()).children(recursive=True):
        try:
            if RANKS in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def model(tmp_path: Path) -> str:
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}
    return str(save_tiny_model(tmp_path / "tiny", "llama", max_position_embeddings=2 * MANY_TOKENS, **shape))


@pytest.fixture
def server(model: str) -> Iterator[LiveServer]:
    config = EngineConfig(
        model=model,
        num_blocks=600,
        tensor_parallel=2,
        tensor_parallel_timeout_s=1.0,
        speculation="off",
        warm_up="quick",
    )
    engine = AsyncEngine.from_config(config)
    with live_server(engine) as running:
        yield running
    asyncio.run(engine.close())
    # One of them may have been starting in the place of another.
    assert not psutil.wait_procs(ranks(), timeout=30)[1]


def answer(http: httpx.Client) -> str:
    """What is answered as soon as anything is; until then, 503 with the time to come again."""
    end = time.monotonic() + 90
    while True:
        response = http.post("/v1/completions", json=BODY)
        if response.status_code == 200:
            text: str = response.json()["choices"][0]["text"]
            return text
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) >= 1
        assert time.monotonic() < end, response.text
        time.sleep(0.1)


def assert_nothing_is_held(http: httpx.Client) -> None:
    cache = http.get("/v1/cache").json()
    assert cache["pool"]["held_blocks"] == 0, cache


@pytest.mark.nightly
def test_ranks_that_are_killed(server: LiveServer) -> None:
    with server.http() as http:
        text = answer(http)
        # Killed in the middle of a stream: it ends with an error.
        (first,) = ranks()
        lines: list[str] = []
        with http.stream(
            "POST",
            "/v1/completions",
            json=BODY | {"max_tokens": MANY_TOKENS, "ignore_eos": True, "stream": True},
        ) as response:
            for line in response.iter_lines():
                if not lines:
                    first.kill()
                lines.append(line)
        assert "was ended by SIGKILL" in "".join(lines)
        assert "data: [DONE]" not in lines
        assert answer(http) == text
        assert_nothing_is_held(http)
        # Killed while nobody asks anything: it is noticed.
        (second,) = ranks()
        assert second.pid != first.pid
        second.kill()
        while http.get("/health/ready").status_code == 200:
            time.sleep(0.01)


@pytest.mark.nightly
def test_ranks_that_hang(server: LiveServer) -> None:
    """Who waits is told after the limit."""
    with server.http() as http:
        text = answer(http)
        (first,) = ranks()
        first.send_signal(signal.SIGSTOP)
        response = http.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert "tensor_parallel_timeout_s" in response.text
        assert psutil.wait_procs([first], timeout=30)[0]
        assert answer(http) == text
        assert_nothing_is_held(http)


@pytest.mark.nightly
def test_ranks_end_with_the_first_one(model: str) -> None:
    program = f"""
import sys
from radixkv import LLM
llm = LLM({model!r}, tensor_parallel=2, num_blocks=32, warm_up="off")
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    others = ranks(psutil.Process(process.pid))
    assert len(others) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    gone, alive = psutil.wait_procs(others, timeout=30)
    assert len(gone) == 1
    assert not alive
