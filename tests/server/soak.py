# SPDX-License-Identifier: Apache-2.0
"""A server under load for a long time: many clients over real HTTP, a third of which leave, and a full pool.

    python tests/server/soak.py --minutes 30

Every answer must be the one that the model gives without any cache; memory must not grow once it is warm;
nothing may be held at the end. The same for some seconds is a test (`test_soak.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from live_server import LiveServer, live_server
from paged_language_model import END, VOCAB, LetterTokenizer, greedy_reference, make_engine

from radixkv.entrypoints.async_engine import AsyncEngine

CLIENTS = 6
NUM_BLOCKS = 96  # of 8 tokens: about what the clients' prompts need, so that blocks are evicted all the time
CANCELLED = 0.3


@dataclass
class Findings:
    """What a soak has seen.

    Attributes:
        endings: requests by how they ended.
        memory: resident bytes, in order, a reading a share of the time.
        evicted_blocks: of the cache.
        held_blocks: at the end.
    """

    endings: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    evicted_blocks: int = 0
    held_blocks: int = 0

    @property
    def growth(self) -> float:
        """Of memory, from the middle to the end, as a share."""
        return self.memory[-1] / self.memory[len(self.memory) // 2] - 1


class Client:
    """Sends conversations that grow, turn by turn, and looks at every answer."""

    def __init__(self, server: LiveServer, number: int, findings: Findings) -> None:
        self.server = server
        self.chance = random.Random(number)
        self.findings = findings
        self.errors: list[BaseException] = []

    def run(self, until: float) -> None:
        try:
            with self.server.http() as http:
                while time.monotonic() < until:
                    self._converse(http, until)
        except BaseException as error:
            self.errors.append(error)

    def _converse(self, http: httpx.Client, until: float) -> None:
        chance = self.chance
        prompt = [3] * 24 + [chance.randint(1, VOCAB - 1) for _ in range(chance.randint(1, 60))]
        for _ in range(chance.randint(1, 4)):
            if time.monotonic() > until:
                break
            most = chance.randint(1, 24)
            body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": chance.random() < 0.7}
            if chance.random() < CANCELLED:
                self._leave(http, body)
                continue
            text = self._ask(http, body)
            expected = [token for token in greedy_reference(prompt, most) if token != END]
            said = LetterTokenizer().decode(expected)
            assert text.removesuffix(chr(33 + END)) == said, (prompt, text, said)
            prompt += [*expected, *(chance.randint(1, VOCAB - 1) for _ in range(5))]

    def _ask(self, http: httpx.Client, body: dict[str, Any]) -> str:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        self.findings.endings["streamed" if body["stream"] else "whole"] += 1
        if not body["stream"]:
            return str(answer.json()["choices"][0]["text"])
        events = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")
        ]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def _leave(self, http: httpx.Client, body: dict[str, Any]) -> None:
        """Close the connection at some point of the answer."""
        self.findings.endings["left"] += 1
        with (
            contextlib.suppress(httpx.HTTPError),
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for _, _ in zip(answer.iter_lines(), range(self.chance.randint(0, 6)), strict=False):
                pass


def soak(seconds: float, readings: int = 10) -> Findings:
    """Run all that.

    Raises:
        AssertionError: an answer was wrong; says which.
    """
    findings = Findings()
    engine, _ = make_engine(num_blocks=NUM_BLOCKS, budget=64, max_model_len=400, tokenizer=LetterTokenizer())
    client = AsyncEngine(engine)
    with live_server(client) as server:
        until = time.monotonic() + seconds
        clients = [Client(server, number, findings) for number in range(CLIENTS)]
        threads = [threading.Thread(target=one.run, args=(until,)) for one in clients]
        for thread in threads:
            thread.start()
        for left in reversed(range(readings)):
            time.sleep(max(0.0, until - time.monotonic() - left * seconds / readings))
            findings.memory.append(resident_bytes())
        for thread in threads:
            thread.join()
        for one in clients:
            for error in one.errors:
                raise error
    stats = client.stats()
    findings.evicted_blocks = stats.cache.evicted_blocks
    findings.held_blocks = _held_when_drained(client)
    return findings


def resident_bytes() -> int:
    """Memory of this process without what is free in it: garbage, and glibc's arenas."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def _held_when_drained(client: AsyncEngine) -> int:
    """Blocks that requests hold once the last client's leaving has been seen."""

    async def look() -> int:
        for _ in range(1000):
            held, left = await client.call(lambda e: (e.cache.stats.held_blocks, len(e.requests)))
            if not left:
                break
        await client.call(lambda e: e.check())
        await client.close()
        return held

    return asyncio.run(look())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args()
    findings = soak(60 * args.minutes, readings=60)
    print(f"requests {dict(findings.endings)}, {findings.evicted_blocks} blocks evicted")
    print("MiB", " ".join(f"{size / 2**20:.1f}" for size in findings.memory))
    print(f"memory {findings.memory[-1] / 2**20:.1f} MiB, {100 * findings.growth:+.2f} % since half-time")
    assert findings.held_blocks == 0, f"{findings.held_blocks} blocks are held"
    assert findings.growth < 0.01, "memory grows"


if __name__ == "__main__":
    main()
