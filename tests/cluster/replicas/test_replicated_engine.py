# SPDX-License-Identifier: Apache-2.0
"""ReplicatedEngine: where requests go; engines that fail, come or leave; what is summed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
from collections.abc import AsyncIterator, Callable

import pytest
from engine_process import paged_engine, paged_engine_elsewhere
from paged_language_model import greedy_reference
from scripted_engine import Asked, ScriptedEngine

from radixkv.cache.accounts import Quota
from radixkv.cache.keys import Owner
from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv.engine.client import EngineClient
from radixkv.errors import (
    ConfigError,
    ContextLengthExceededError,
    EngineOverloadedError,
    EngineStoppedError,
    RequestFailedError,
)
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin, Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MEDIUM = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
TEXT = "some words that go on, say:an answer"


@contextlib.asynccontextmanager
async def several(patience_s: float = 10.0, **engines: EngineClient) -> AsyncIterator[ReplicatedEngine]:
    engine = ReplicatedEngine(engines, patience_s=patience_s)
    try:
        yield engine
    finally:
        await engine.close()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def ids(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(1, 97) for _ in range(count)]


def failing_at(token: int, error: BaseException) -> Callable[[Asked, int], BaseException | None]:
    return lambda asked, given: error if given == token else None


def counts(engine: ReplicatedEngine, name: str):
    (found,) = [one for one in engine.stats().replicas if one.name == name]
    return found


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [EngineStoppedError("gone"), EngineOverloadedError("full")])
@pytest.mark.parametrize("streamed", [True, False])
async def test_what_fails_before_the_first_token_is_answered_by_another(error, streamed):
    good, bad = ScriptedEngine(), ScriptedEngine(fail=failing_at(0, error))
    async with several(bad=bad, good=good) as engine:
        for _ in range(8):
            if streamed:
                text = "".join([delta.text async for delta in engine.stream(Request(TEXT, SamplingParams()))])
            else:
                text = (await engine.generate(Request(TEXT, SamplingParams()))).outputs[0].text
            assert text == "an answer"
        assert len(good.requests) == 8
        assert counts(engine, "bad").retries == len(bad.requests)
        assert {one.running for one in engine.stats().replicas} == {0}


async def test_what_fails_after_the_first_token_ends_with_its_error():
    engines = {name: ScriptedEngine(fail=failing_at(3, EngineStoppedError("gone"))) for name in "ab"}
    async with several(**engines) as engine:
        stream = engine.stream(Request(TEXT, SamplingParams()))
        assert "".join([(await anext(stream)).text for _ in range(3)]) == "an "
        with pytest.raises(EngineStoppedError, match="gone"):
            await anext(stream)
        assert sum(len(one.requests) for one in engines.values()) == 1
        assert {one.running for one in engine.stats().replicas} == {0}


async def test_a_whole_answer_is_begun_anew_wherever_it_failed():
    bad = ScriptedEngine(fail=failing_at(3, EngineStoppedError("gone")))
    async with several(bad=bad, good=ScriptedEngine()) as engine:
        for _ in range(4):
            assert (await engine.generate(Request(TEXT, SamplingParams()))).outputs[0].text == "an answer"


async def test_a_request_that_is_at_fault_itself_is_not_tried_elsewhere():
    engines = {name: ScriptedEngine(fail=failing_at(0, RequestFailedError("nan"))) for name in "ab"}
    async with several(**engines) as engine:
        with pytest.raises(RequestFailedError, match="nan"):
            await engine.generate(Request(TEXT, SamplingParams()))
        assert sum(len(one.requests) for one in engines.values()) == 1


async def test_where_all_are_full_or_gone_the_error_says_when_to_come_again():
    full = {name: ScriptedEngine(fail=failing_at(0, EngineOverloadedError("full"))) for name in "ab"}
    async with several(**full) as engine:
        with pytest.raises(EngineOverloadedError, match="full"):
            await engine.generate(Request(TEXT, SamplingParams()))
    gone = ScriptedEngine(fail=failing_at(0, EngineStoppedError("gone")))
    async with several(patience_s=0.3, gone=gone) as engine:
        with pytest.raises(EngineStoppedError, match="no replica takes requests now") as caught:
            await engine.generate(Request(TEXT, SamplingParams()))
        assert caught.value.retry_after_s


async def test_a_request_waits_for_an_engine_where_there_is_none():
    first, second = ScriptedEngine(), ScriptedEngine()
    async with several(first=first) as engine:
        engine.remove("first")
        assert not engine.is_healthy
        asked = asyncio.ensure_future(engine.generate(Request(TEXT, SamplingParams())))
        await asyncio.sleep(0.1)
        assert not asked.done()
        engine.add("second", second)
        assert (await asyncio.wait_for(asked, 20)).outputs[0].text == "an answer"
        assert engine.names == ["second"]


async def test_a_killed_process_costs_no_request_without_a_token_and_is_forgotten():
    before = set(multiprocessing.active_children())
    dies = await asyncio.to_thread(paged_engine_elsewhere, block_size=16, num_blocks=256, max_num_seqs=1)
    (process,) = set(multiprocessing.active_children()) - before
    lives = await asyncio.to_thread(paged_engine_elsewhere, block_size=16, num_blocks=256)
    async with several(dies=dies, lives=lives) as engine:
        prompts = [ids(seed, 100) for seed in range(12)]
        for prompt in prompts:
            await engine.generate(Request(prompt, GREEDY))
        await until(lambda: counts(engine, "dies").blocks > 0)
        streams = [engine.stream(Request(ids(100 + i, 50), MEDIUM)) for i in range(12)]
        # With one request at a time most of those that wait there have no token yet.
        ends = [asyncio.ensure_future(_collect(stream)) for stream in streams]
        await until(lambda: counts(engine, "dies").running > 2)
        process.kill()
        await until(lambda: not counts(engine, "dies").is_open and counts(engine, "dies").blocks == 0)
        for i, (tokens, error) in enumerate(await asyncio.gather(*ends)):
            expected = greedy_reference_without_end(ids(100 + i, 50), len(tokens))
            assert tokens == expected
            assert (error is None and len(tokens) == 100) or (error is not None and tokens), (
                len(tokens),
                error,
            )
        assert counts(engine, "dies").retries > 0
        for prompt in prompts:
            await engine.generate(Request(prompt, GREEDY))


async def _collect(stream) -> tuple[list[int], Exception | None]:
    tokens: list[int] = []
    try:
        async for delta in stream:
            tokens += delta.token_ids
    except EngineStoppedError as error:
        return tokens, error
    return tokens, None


def greedy_reference_without_end(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:  # the reference stops at the end token, which these requests ignore
        tokens += greedy_reference([*prompt, *tokens], count - len(tokens))
    return tokens


# ---------------------------------------------------------------------- where requests go


async def test_prompts_go_where_their_prefix_is_and_nothing_is_computed_twice():
    engines = {name: paged_engine(block_size=16, num_blocks=512) for name in "abc"}
    async with several(**engines) as engine:
        families = [ids(seed, 160) for seed in range(9)]
        for turn in range(4):
            for i, family in enumerate(families):
                output = await engine.generate(
                    Request([*family, *ids(1000 * turn + i, 20)], GREEDY, tenant=f"t{i % 2}")
                )
                if turn:
                    assert output.num_cached_tokens >= 160
        stats = engine.stats()
        assert sum(one.requests > 0 for one in stats.replicas) > 1, "new families are spread"
        computed = [one.stats().computed_prompt_tokens for one in engines.values()]
        assert stats.computed_prompt_tokens == sum(computed)
        assert stats.cached_prompt_tokens >= 27 * 160


async def test_new_prompts_are_spread_though_some_replica_always_measures_as_the_quickest():
    async with several(**{name: paged_engine(block_size=16, num_blocks=2048) for name in "ab"}) as engine:
        for seed in range(40):  # one after the other: there is never a queue
            await engine.generate(Request(ids(seed, 200), GREEDY))
        used = [one.requests for one in engine.stats().replicas]
        assert min(used) >= 8, used


async def test_tenants_and_salts_find_only_their_own_on_every_replica():
    async with several(**{name: paged_engine(block_size=16, num_blocks=256) for name in "ab"}) as engine:
        prompt = ids(1, 64)
        for owner in (Owner("x"), Owner("y"), Owner("x", "s")):
            assert (
                await engine.generate(Request(prompt, GREEDY, tenant=owner.tenant, salt=owner.salt))
            ).num_cached_tokens == 0
            assert await engine.cache.match(prompt, owner) == 64
        assert await engine.cache.match(prompt, Owner("z")) == 0
        assert (await engine.cache.explain(prompt, Owner("x"))).reason == "hit"


async def test_requests_of_one_session_stay_together_where_nothing_else_decides():
    engines = {name: ScriptedEngine() for name in "abcd"}
    async with several(**engines) as engine:
        for i in range(12):
            await engine.generate(Request(f"{i} say:x", SamplingParams(), cache_key_hint="conversation"))
        assert sorted(len(one.requests) for one in engines.values()) == [0, 0, 0, 12]


# ---------------------------------------------------------------------- engines come and leave


async def test_a_drained_engine_ends_what_it_has_and_leaves_with_its_counts():
    engines = {name: paged_engine(block_size=16, num_blocks=256) for name in "ab"}
    async with several(**engines) as engine:
        streams = [engine.stream(Request(ids(seed, 40), LONG)) for seed in range(4)]
        first = [await anext(stream) for stream in streams]
        assert all(one.running == 2 for one in engine.stats().replicas)
        engine.drain("a")
        before = counts(engine, "a").requests
        for seed in range(6):
            await engine.generate(Request(ids(50 + seed, 40), GREEDY))
        assert counts(engine, "a").requests == before
        results = await asyncio.gather(*map(_collect, streams))
        for delta, (tokens, error) in zip(first, results, strict=True):
            assert error is None
            assert len(delta.token_ids) + len(tokens) == 300
        await until(lambda: engine.names == ["b"])
        assert engine.stats().finished_requests == 10, "what has left still counts"
        await until(lambda: not engines["a"].is_healthy)


async def test_who_comes_later_gets_quotas_and_public_text_before_any_request():
    async with several(a=paged_engine(block_size=16, num_blocks=128)) as engine:
        public = ids(1, 32)
        await engine.cache.set_quotas({"small": Quota(0, 2)})
        await engine.cache.publish(public)
        engine.add("b", paged_engine(block_size=16, num_blocks=128))
        engine.remove("a")
        with pytest.raises(ContextLengthExceededError):
            await engine.generate(Request(ids(2, 64), GREEDY, tenant="small"))
        await engine.generate(Request([*public, 5, 6], GREEDY, tenant="x"))
        assert await engine.cache.match([*public, 7], Owner("y")) == 32
        assert [quota.ceiling for quota in await engine.cache.quotas()] == [2]


async def test_quotas_that_one_engine_refuses_hold_nowhere():
    engines = {name: paged_engine(block_size=16, num_blocks=128) for name in "ab"}
    async with several(**engines) as engine:
        await engine.cache.set_quotas({"early": Quota(0, 8)})
        await engines["b"].generate(Request(ids(1, 40), GREEDY, tenant="late"))
        with pytest.raises(ConfigError, match="'late' has blocks"):
            await engine.cache.set_quotas({"early": Quota(0, 4), "late": Quota(0, 4)})
        for one in engines.values():
            ceilings = {quota.namespace[0]: quota.ceiling for quota in await one.cache.quotas()}
            assert (ceilings["early"], ceilings.get("late")) == (8, None)


async def test_another_model_or_a_name_twice_is_refused():
    other = ScriptedEngine(model_fingerprint="other-weights")
    async with several(a=ScriptedEngine()) as engine:
        with pytest.raises(ConfigError, match="all replicas must be started alike"):
            engine.add("b", other)
        with pytest.raises(ConfigError, match="a replica a already"):
            engine.add("a", ScriptedEngine())
        assert engine.names == ["a"]


# ---------------------------------------------------------------------- the caches as one


async def test_pins_reset_and_what_is_told_are_over_all():
    engines = {name: paged_engine(block_size=16, num_blocks=128) for name in "ab"}
    async with several(**engines) as engine:
        prompt = ids(3, 48)
        for one in engines.values():
            await one.generate(Request(prompt, GREEDY, tenant="t"))
        pin = await engine.cache.pin(prompt, Owner("t"), ttl=60)
        assert pin.num_tokens == 48
        assert [len(await one.cache.pins()) for one in engines.values()] == [1, 1]
        assert [told.id for told in await engine.cache.pins()] == [pin.id], "once, wherever it is"
        assert engine.stats().cache.num_pins == 2
        assert await engine.cache.unpin_id(pin.id, Owner("t"))
        assert [await one.cache.pins() for one in engines.values()] == [[], []]
        nodes = (await engine.cache.nodes(tenant="t")).nodes
        assert len({node.id for node in nodes}) == len(nodes) >= 2
        assert engine.stats().cache.total_blocks == 256
        await engine.cache.reset()
        assert [await one.cache.match(prompt, Owner("t")) for one in engines.values()] == [0, 0]
        output = await engine.generate(Request(prompt, GREEDY, tenant="t", pins=(PrefixPin(32, 60.0),)))
        assert output.num_pinned_tokens == 32
        assert len(await engine.cache.pins(tenant="t")) == 1


async def test_events_of_all_and_removals_when_an_engine_leaves():
    engines = {name: paged_engine(block_size=16, num_blocks=128) for name in "ab"}
    async with several(**engines) as engine:
        present: set[int] = set()

        async def follow() -> None:
            async for changes in engine.cache.events():
                present.difference_update(block for run in changes.removed for block in run.block_ids)
                present.update(block for run in changes.stored for block in run.block_ids)

        following = asyncio.ensure_future(follow())
        for i, one in enumerate(engines.values()):
            await one.generate(Request(ids(i, 64), GREEDY))
        await until(lambda: len(present) == 8)
        await engines["a"].cache.reset()
        await until(lambda: len(present) == 4)
        engine.add("c", paged_engine(block_size=16, num_blocks=128))
        engine.remove("b")
        await until(lambda: not present)
        await engine.generate(Request(ids(9, 64), GREEDY))
        await until(lambda: len(present) == 4)
        following.cancel()


async def test_an_abort_finds_the_engine():
    async with several(**{name: paged_engine(block_size=16, num_blocks=256) for name in "ab"}) as engine:
        streams = [engine.stream(Request(ids(seed, 30), LONG, request_id=f"r{seed}")) for seed in range(4)]
        for stream in streams:
            await anext(stream)
        for seed, stream in enumerate(streams):
            await engine.abort(f"r{seed}")
            assert [delta.finish_reason async for delta in stream][-1] == "abort"


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.nightly), 1])
async def test_any_traffic_while_engines_come_fail_and_leave(seed):
    numbers = random.Random(seed)
    engines = {"0": paged_engine(block_size=16, num_blocks=64)}
    engine = ReplicatedEngine(engines)
    names = ["0"]
    families = [ids(1000 + i, numbers.randrange(20, 120)) for i in range(5)]

    async def one_request() -> None:
        prompt = [*numbers.choice(families), *ids(numbers.randrange(50), numbers.randrange(1, 30))]
        params = SamplingParams(temperature=0.0, max_tokens=numbers.randrange(1, 40), ignore_eos=True)
        stream = engine.stream(Request(prompt, params, tenant=numbers.choice(["", "a", "b"])))
        tokens: list[int] = []
        leaves_at = numbers.choice([None, None, 1, 5])
        try:
            async for delta in stream:
                tokens += delta.token_ids
                if leaves_at is not None and len(tokens) >= leaves_at:
                    break
            else:
                assert len(tokens) == params.max_tokens
        except EngineStoppedError:
            assert tokens, "before its first token it had to go elsewhere"
        finally:
            await stream.aclose()
        assert tokens == greedy_reference_without_end(prompt, len(tokens))

    try:
        for _ in range(12):
            asked = [asyncio.ensure_future(one_request()) for _ in range(10)]
            await asyncio.sleep(0.01 * numbers.random())
            what = numbers.choice(["add", "drain", "fail", "reset", "none"])
            if what == "add" or (what != "none" and len(names) < 2):
                name = str(len(engines))
                engines[name] = paged_engine(block_size=16, num_blocks=64)
                engine.add(name, engines[name])
                names.append(name)
            if what == "drain" and len(names) > 1:
                engine.drain(names.pop(0))
            elif what == "fail" and len(names) > 1:
                name = names.pop(0)
                await engines[name].close()
                engine.remove(name)
            elif what == "reset":
                await engine.cache.reset()
            await asyncio.gather(*asked)
        await until(lambda: sorted(engine.names) == sorted(names))
        for one in engine.stats().replicas:
            assert (one.running, one.queue_s) == (0, 0.0)
        await engine.cache.reset()
        await until(lambda: all(one.blocks == 0 for one in engine.stats().replicas))
    finally:
        await engine.close()
