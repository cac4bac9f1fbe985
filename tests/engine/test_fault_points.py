# SPDX-License-Identifier: Apache-2.0
"""A fault anywhere, at any moment: every request ends in exactly one way, and nothing is held after that.

`make soak` sets RADIXKV_FAULT_SEEDS to 50.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from paged_language_model import LetterTokenizer, PagedHashModel, greedy_reference, make_engine

import radixkv.entrypoints.async_engine as streams
from radixkv import PrefixCache
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.capacity import Capacity
from radixkv.cache.lease import Lease
from radixkv.engine.engine import Engine
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.errors import RadixKVError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler

SEEDS = int(os.environ.get("RADIXKV_FAULT_SEEDS", "4"))

#: Where a fault happens: an owner and the name of what fails there.
POINTS: dict[str, tuple[Any, str]] = {
    "tokenise": (LetterTokenizer, "encode"),
    "add": (Engine, "add_request"),
    "schedule": (Scheduler, "schedule"),
    "lookup": (PrefixCache, "acquire"),
    "room": (Capacity, "require"),
    "evict": (BlockPool, "free"),
    "model step": (PagedHashModel, "execute"),
    "sampling": (SamplingState, "draw"),
    "detokenise": (LetterTokenizer, "decode"),
    "commit": (Lease, "commit"),
    "append": (Lease, "append"),
    "release": (Lease, "release"),
    "finish": (Scheduler, "finish"),
    "send": (streams, "send"),
}
ENDINGS = {"finished", "failed", "left"}

pytestmark = pytest.mark.injects_faults


class Panic(BaseException):
    """What a panic of a Rust library looks like from Python."""


class Fault:
    """Stands in for a function; one of its calls raises, before or after the function has run."""

    def __init__(self, function: Callable[..., Any], chance: random.Random, *, may_run: bool) -> None:
        self.function = function
        self.call = int(chance.paretovariate(0.7))  # mostly among the first, sometimes far on
        self.after = may_run and chance.random() < 0.3
        self.error = chance.choice([RuntimeError, AssertionError, MemoryError, KeyError, Panic])("injected")
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls != self.call:
            return self.function(*args, **options)
        if self.after:
            self.function(*args, **options)
        raise self.error


async def ask(engine: AsyncEngine, number: int, chance: random.Random) -> str:
    """One request in some manner; how it ended."""
    prompt = [7] * chance.choice([0, 9, 16]) + [
        1 + (number * 31 + i) % 90 for i in range(chance.randint(1, 20))
    ]
    text = "".join(chr(33 + token) for token in prompt) if chance.random() < 0.5 else prompt
    samples = chance.choice([1, 1, 2, 3])
    params = SamplingParams(
        temperature=chance.choice([0.0, 1.0]), seed=number, n=samples, max_tokens=chance.randint(1, 12)
    )
    leaves_after = chance.choice([None, None, 0, 2])
    ended: Counter[int] = Counter()
    try:
        if chance.random() < 0.3:
            output = await engine.generate(Request(text, params))
            assert all(sample.finish_reason in ("stop", "length") for sample in output.outputs)
            return "finished"
        async with contextlib.aclosing(engine.stream(Request(text, params))) as deltas:
            count = 0
            async for delta in deltas:
                assert not ended[delta.index], "nothing follows the end of a sample"
                ended[delta.index] += delta.finish_reason is not None
                count += 1
                if count == leaves_after:
                    return "left"
    except RadixKVError:
        return "failed"
    except Panic:
        return "failed"  # the tokeniser's, on the caller's own thread
    except Exception as error:
        if "injected" not in str(error):
            raise
        return "failed"
    assert sum(ended.values()) == samples, "every sample has ended"
    return "finished"


async def one_run(monkeypatch: pytest.MonkeyPatch, point: str, seed: int) -> tuple[Counter[str], bool]:
    """How the requests ended, and whether the engine lives."""
    chance = random.Random(f"{point} {seed}")
    engine = AsyncEngine(
        make_engine(
            num_blocks=chance.choice([16, 40]),
            model=None,
            budget=chance.choice([16, 64]),
            tokenizer=LetterTokenizer(),
        )[0]
    )
    owner, name = POINTS[point]
    fault = Fault(getattr(owner, name), chance, may_run=point != "add")  # who is refused is not served
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, **options: fault(*args, **options))
            works = [ask(engine, number, chance) for number in range(6)]
            endings = await asyncio.wait_for(asyncio.gather(*works), 60)
        assert set(endings) <= ENDINGS
        if engine.is_healthy:

            def look(inner: Engine) -> tuple[int, int, int]:
                inner.check()
                return len(inner.requests), inner.cache.stats.held_blocks, inner.scheduler.num_waiting

            for _ in range(100):  # what nobody waits for any more may have a step to go
                if await engine.call(look) == (0, 0, 0):
                    break
            assert await engine.call(look) == (0, 0, 0), "nothing is held when all have ended"
            good = await engine.generate(Request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=5)))
            assert good.outputs[0].token_ids == greedy_reference([5, 6, 7], 5)
        return Counter(endings), engine.is_healthy
    finally:
        await engine.close()


@pytest.mark.parametrize("point", POINTS)
async def test_every_request_ends_once_wherever_a_fault_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, point: str
) -> None:
    caplog.set_level("CRITICAL", logger="radixkv")
    dead = 0
    for seed in range(SEEDS):
        try:
            _, lives = await one_run(monkeypatch, point, seed)
        except BaseException as error:
            error.add_note(f"seed {seed} of the fault point {point!r}")
            raise
        dead += not lives
    if point in ("tokenise", "model step", "sampling", "detokenise"):
        assert dead == 0, "a fault of a request's own ends no engine"
