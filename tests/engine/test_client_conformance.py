# SPDX-License-Identifier: Apache-2.0
"""What every `EngineClient` does: one here, one elsewhere, several as one, and the server tests' own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from engine_process import paged_engine, paged_engine_elsewhere, served_in_a_thread
from scripted_engine import ScriptedEngine

from radixkv.cache.accounts import Quota
from radixkv.cache.keys import Owner
from radixkv.cache.pins import PinInfo
from radixkv.cluster.replicas.adapters import ReplicatedAdapters
from radixkv.cluster.replicas.cache import ReplicatedCache
from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv.cluster.replicas.members import Members
from radixkv.engine.adapters import AdapterRegistry, Adapters
from radixkv.engine.cache_client import CacheClient
from radixkv.engine.calls import Call, call, calls_of
from radixkv.engine.client import EngineClient
from radixkv.engine.counts import EngineStats
from radixkv.engine.outputs import OutputDelta
from radixkv.entrypoints.async_cache import AsyncCache
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.errors import (
    ContextLengthExceededError,
    EngineStoppedError,
    InvalidRequestError,
    RadixKVError,
)
from radixkv.observe.residency import Residency
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin, Request

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
PROMPT = list(b"say:some words that go on for a while")  # the scripted engine answers with them
CACHED = list(range(1, 41))


def to_ids(engine: EngineClient, tokens: list[int]) -> list[int]:
    """The same prompt in a small vocabulary."""
    return [1 + token % (engine.tokenizer.vocab_size - 1) for token in tokens]


def prompt_of(engine: EngineClient) -> list[int]:
    return PROMPT if isinstance(engine, ScriptedEngine) else to_ids(engine, PROMPT)


@pytest.fixture(params=["async", "process", "several", "scripted"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    made: EngineClient
    if request.param == "async":
        made = paged_engine(num_blocks=128, block_size=16)
    elif request.param == "process":
        made = paged_engine_elsewhere(num_blocks=128, block_size=16)
    elif request.param == "several":
        made = ReplicatedEngine(
            {
                "here": paged_engine(num_blocks=128, block_size=16),
                "elsewhere": paged_engine_elsewhere(num_blocks=128, block_size=16),
            }
        )
    else:
        made = ScriptedEngine(max_model_len=2048)
    yield made
    await made.close()


async def fill(engine: EngineClient, tokens: list[int], tenant: str = "", salt: str = "") -> None:
    """Put a prefix into the cache, where a request of this tenant would put it."""
    if isinstance(engine, ScriptedEngine):
        lease = engine.prefix_cache.acquire(tokens, engine.cache.namespace(tenant, salt))
        lease.commit(len(tokens))
        lease.release()
    else:
        await engine.generate(Request(tokens, SamplingParams(max_tokens=1), tenant=tenant, salt=salt))
    while isinstance(engine, ReplicatedEngine):  # what begins alike goes there once it has heard
        if max(replica.blocks for replica in engine.stats().replicas) >= len(tokens) // 16:
            break
        await asyncio.sleep(0.01)


#: Properties that are None of an engine whose model reads text alone.
NONE_HERE = ("image_processor",)


@pytest.mark.parametrize("protocol", [EngineClient, CacheClient])
def test_every_member_is_there_with_its_signature(engine, protocol):
    thing = engine if protocol is EngineClient else engine.cache
    names = [name for name in vars(protocol) if not name.startswith("_")]
    assert names
    for name in names:
        wanted = inspect.getattr_static(protocol, name)
        if isinstance(wanted, property):
            value = getattr(thing, name)
            assert value is not None or name in NONE_HERE, name
            continue
        found = getattr(thing, name)
        asked = [(p.name, p.kind, p.default) for p in inspect.signature(wanted).parameters.values()][1:]
        given = [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()]
        more = given[len(asked) :]  # of `AsyncEngine`, which takes prompts and parameters, too
        if more:
            given, asked = given[1 : len(asked)], asked[1:]
        assert given == asked, name
        assert all(default is not inspect.Parameter.empty for _, _, default in more), name
        assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(wanted), name


async def test_every_call_has_a_way_here_and_for_several_engines():
    """`AsyncEngine`, `AsyncCache` and the registry say what calls do; rules merge the answers of several."""
    here = {EngineClient: AsyncEngine, CacheClient: AsyncCache, Adapters: AdapterRegistry}
    together = {EngineClient: ReplicatedEngine, CacheClient: ReplicatedCache, Adapters: ReplicatedAdapters}
    num_calls = 0
    for table, one in here.items():
        for name, row in calls_of(table).items():
            num_calls += 1
            assert not hasattr(getattr(one, name), "call"), f"{one.__name__} does not say what {name} does"
            has_way = row.merge is not None or not hasattr(getattr(together[table], name), "call")
            assert has_way, f"{name} has no rule for several engines"
    assert num_calls > 20


async def test_without_engines_every_call_on_their_caches_says_so():
    several = ReplicatedCache(Members(), "model")
    given = {"token_ids": [1, 2], "pin_id": "p", "quotas": {}}
    for name, row in calls_of(CacheClient).items():
        if row.manner == "awaited":
            needed = [given[p] for p in row.signature.parameters if p in given]
            with pytest.raises(EngineStoppedError, match="no replica"):
                await getattr(several, name)(*needed)


async def test_a_new_call_is_a_row_and_what_it_does_in_an_engine(monkeypatch):
    """Engines elsewhere, several as one, and several elsewhere follow from these two."""

    async def num_said(self, owner: str, *, most: int = 5) -> int:
        return min(most, sum(asked.tenant == owner for asked in self.requests))

    monkeypatch.setattr(EngineClient, "num_said", call(merge=sum, divided=("most",))(num_said), raising=False)
    monkeypatch.setattr(ScriptedEngine, "num_said", num_said, raising=False)
    first, second = ScriptedEngine(), ScriptedEngine()
    for engine, count in ((first, 3), (second, 1)):
        for _ in range(count):
            await engine.generate(Request("hi", PARAMS, tenant="a"))
    async with served_in_a_thread(second) as elsewhere:
        several = ReplicatedEngine({"first": first, "second": elsewhere})
        assert await elsewhere.num_said("a") == 1
        assert await several.num_said("a") == 3, "each of two says at most 2 of 5"
        assert await several.num_said("a", most=100) == 4
        assert await several.num_said("b") == 0
        await several.close()


async def test_nothing_but_calls_is_done_for_an_engine_elsewhere():
    scripted = ScriptedEngine()
    async with served_in_a_thread(scripted) as engine:
        for name in (
            "release",
            "__class__",
            "cache.namespace",
            "cache._run",
            "adapters.check_enabled",
            "x.y",
            "",
        ):
            row = Call(name, inspect.signature(lambda: None), "awaited")
            with pytest.raises(InvalidRequestError, match="has no call"):
                await engine.perform(row, (), {})
        assert await engine.cache.match([1]) == 0


async def test_facts(engine):
    assert engine.is_healthy
    assert engine.limits.max_model_len >= 2048
    assert engine.model_name
    assert isinstance(engine.model_fingerprint, str)
    assert isinstance(engine.stats(), EngineStats)
    assert engine.config.block_size == 16


async def test_text_and_chats_become_ids(engine):
    tokenizer = engine.tokenizer
    text = "abc"
    assert await engine.tokenize(text) == tokenizer.encode(text)
    long = "abc" * 3000
    assert await engine.tokenize(long, add_special_tokens=False, allow_special=False) == tokenizer.encode(
        long
    )
    messages = [{"role": "user", "content": text}]
    assert await engine.render_chat(messages) == tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(tokenizer.encode(text))
    assert tokenizer.has_chat_template


async def test_a_ceiling_refuses_one_prompt_or_several_before_any_begins(engine):
    await engine.cache.set_quotas({"small": Quota(0, 2)})
    short, long = to_ids(engine, list(range(1, 32))), to_ids(engine, list(range(1, 33)))
    owner = {"tenant": "small", "salt": "x"}
    await engine.check_quota([Request(short, PARAMS, **owner) for _ in range(2)])
    await engine.check_quota([Request(prompt, PARAMS, tenant="other") for prompt in (short, long)])
    both = [Request(prompt, PARAMS, **owner) for prompt in (short, long)]
    for refused in (engine.check_quota(both), engine.generate(Request(long, PARAMS, **owner))):
        with pytest.raises(ContextLengthExceededError, match=r"32 tokens.*2 blocks of 16"):
            await refused
    assert engine.stats().num_waiting in (0, 3), "the scripted engine says 3"


async def test_a_stream_adds_up_to_the_output(engine):
    prompt = prompt_of(engine)
    deltas: list[OutputDelta] = [
        delta async for delta in engine.stream(Request(prompt, PARAMS, request_id="mine"))
    ]
    output = await engine.generate(Request(prompt, PARAMS))
    assert output.prompt_token_ids == prompt
    assert output.prompt is None
    (sample,) = output.outputs
    assert [token for delta in deltas for token in delta.token_ids] == sample.token_ids
    assert "".join(delta.text for delta in deltas) == sample.text
    assert len(sample.token_ids) == 5
    assert {delta.request_id for delta in deltas} == {"mine"}
    (told,) = [delta.prompt for delta in deltas if delta.prompt is not None]
    assert deltas[0].prompt is told, "of the prompt, once"
    assert (told.num_tokens, told.num_cached_tokens) == (len(prompt), deltas[0].prompt.num_cached_tokens)
    assert [delta.is_last for delta in deltas] == [False] * 4 + [True]
    assert [delta.times is not None for delta in deltas] == [True, False, False, False, True]
    assert [delta.finish_reason for delta in deltas][-1] == sample.finish_reason == "length"
    assert output.times is not None
    assert output.num_generated_tokens == 5


async def test_samples_and_logprobs(engine):
    params = SamplingParams(n=2, seed=1, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = await engine.generate(Request(prompt_of(engine), params))
    assert [sample.index for sample in output.outputs] == [0, 1]
    for sample in output.outputs:
        assert len(sample.logprobs) == len(sample.token_ids) == 3
        assert len(sample.logprobs[0].top) == 2
    assert len(output.prompt_logprobs) == len(prompt_of(engine))
    assert output.prompt_logprobs[0] is None
    deltas = [delta async for delta in engine.stream(Request(prompt_of(engine), params))]
    assert [delta.prompt is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert deltas[0].prompt.logprobs == output.prompt_logprobs
    assert [delta.is_last for delta in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_text_and_arrays_are_prompts(engine):
    ids = engine.tokenizer.encode("abc")
    assert (await engine.generate(Request("abc", PARAMS))).prompt == "abc"
    for prompt in ("abc", ids, tuple(ids), np.array(ids), np.array(ids, dtype=np.int32)):
        assert (await engine.generate(Request(prompt, PARAMS))).prompt_token_ids == ids


@pytest.mark.parametrize("bad", [[], [-1], [10**6], [1.5], ["a"], [[1]], None, 5])
async def test_bad_prompts_are_refused(engine, bad):
    with pytest.raises(InvalidRequestError):
        await engine.generate(Request(bad, PARAMS))
    with pytest.raises(InvalidRequestError):
        await anext(engine.stream(Request(bad, PARAMS)))


async def test_what_is_too_long_is_refused(engine):
    with pytest.raises(ContextLengthExceededError):
        await engine.generate(Request([1] * engine.limits.max_model_len, PARAMS))


async def test_a_closed_iterator_frees_the_id_at_once(engine):
    prompt = prompt_of(engine)
    expected = (await engine.generate(Request([5, 6, 7], PARAMS))).outputs[0].token_ids
    for _ in range(3):
        stream = engine.stream(Request(prompt, LONG, request_id="same"))
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="same"):
            await engine.generate(Request([5, 6, 7], PARAMS, request_id="same"))
        await stream.aclose()
        output = await engine.generate(Request([5, 6, 7], PARAMS, request_id="same"))
        assert output.prompt_token_ids == [5, 6, 7]
        assert output.outputs[0].token_ids == expected


async def test_an_aborted_request_ends_with_that_reason(engine):
    stream = engine.stream(Request(prompt_of(engine), LONG, request_id="mine"))
    await anext(stream)
    await engine.abort("mine")
    await engine.abort("nobody")
    reasons = [delta.finish_reason async for delta in stream]
    assert reasons[-1] == "abort"
    assert len(reasons) < 200


async def test_after_closing_everything_says_so(engine):
    stream = engine.stream(Request(prompt_of(engine), LONG))
    await anext(stream)
    events = engine.cache.events()
    follower = asyncio.ensure_future(read(events))
    await asyncio.sleep(0)
    await engine.cache.match([1])
    await engine.close()
    await engine.close()
    with pytest.raises(EngineStoppedError):
        async for _ in stream:
            pass
    with pytest.raises(EngineStoppedError):
        await asyncio.wait_for(follower, 30)
    assert not engine.is_healthy
    for ask in (
        engine.generate(Request([1], PARAMS)),
        anext(engine.stream(Request([1], PARAMS))),
        engine.cache.reset(),
    ):
        with pytest.raises(EngineStoppedError):
            await ask
    assert isinstance(engine.stats(), EngineStats)
    await engine.abort("nobody")


async def read(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass


async def test_tenants_and_salts_are_apart(engine):
    await fill(engine, CACHED, tenant="a", salt="s")
    assert await engine.cache.match(CACHED, Owner("a", "s")) >= 39
    for owner in (Owner(), Owner("a"), Owner("", "s"), Owner("s", "a")):
        assert await engine.cache.match(CACHED, owner) == 0
    assert (await engine.cache.explain(CACHED, Owner("b"))).reason == "first_seen"
    assert (await engine.cache.explain(CACHED, Owner("b"), admin=True)).reason == "namespace"
    assert engine.cache.namespace("a", "s") == ("a", "s", "", engine.model_fingerprint)


async def test_pins(engine):
    await fill(engine, CACHED, tenant="a", salt="s")
    pinned = await engine.cache.pin(CACHED[:32], Owner("a", "s"), ttl=60.0)
    assert await engine.cache.pin([90, 91]) is None, "nothing of it is cached"
    (pin,) = await engine.cache.pins(tenant="a")
    assert isinstance(pin, PinInfo)
    assert replace(pinned, expires_in_s=pin.expires_in_s) == pin
    assert (pin.tenant, pin.salt, list(pin.token_ids), pin.num_tokens) == ("a", "s", CACHED[:32], 32)
    assert 0 < pin.expires_in_s <= 60
    assert len(await engine.cache.pins()) == 1
    assert await engine.cache.pins(tenant="b") == []
    assert not await engine.cache.unpin(CACHED[:32], Owner("b"))
    assert await engine.cache.unpin(CACHED[:32], Owner("a", "s"))
    assert await engine.cache.pins() == []
    with pytest.raises(RadixKVError):
        await engine.cache.pin(CACHED, ttl=-1.0)


@pytest.mark.parametrize("streamed", [True, False])
async def test_pins_are_set_with_the_request(streamed):
    for engine in (
        paged_engine(num_blocks=128, block_size=16),
        paged_engine_elsewhere(num_blocks=128, block_size=16),
        ScriptedEngine(max_model_len=2048, caches=True),
    ):
        owner = {"tenant": "a", "salt": "s"}
        pins = (PrefixPin(16, 60.0), PrefixPin(33, 90.0))
        if streamed:
            stream = engine.stream(Request(CACHED, LONG, pins=pins, **owner))
            first = await anext(stream)
            assert first.prompt.num_pinned_tokens == 33
            told = await engine.cache.pins(tenant="a")  # while it runs
            await stream.aclose()
        else:
            assert (
                await engine.generate(Request(CACHED, PARAMS, pins=pins, **owner))
            ).num_pinned_tokens == 33
            told = await engine.cache.pins(tenant="a")
        assert sorted(pin.num_tokens for pin in told) == [16, 33]
        assert {pin.salt for pin in told} == {"s"}
        assert (await engine.generate(Request(CACHED, PARAMS, tenant="b"))).num_pinned_tokens is None
        with pytest.raises(InvalidRequestError, match="41 tokens are to be pinned, but the prompt has 40"):
            await engine.generate(Request(CACHED, PARAMS, pins=[PrefixPin(41, 60.0)]))
        for wrong in (None, "all", [16], PrefixPin(16)):
            with pytest.raises(InvalidRequestError, match="pins must be a sequence of PrefixPin"):
                await engine.generate(Request(CACHED, PARAMS, pins=wrong))  # type: ignore[arg-type]
        for bad in ((0, 1.0), (True, 1.0), (3, 0.0), (3, float("nan")), (3, float("inf"))):
            with pytest.raises(InvalidRequestError, match="pin"):
                PrefixPin(*bad)
        await engine.close()


async def test_no_choice_of_tenant_and_salt_finds_what_anothers_cached(engine):
    """Parts are framed: they can't run together, whatever characters are in them."""
    names = ("", "a", "ab", "bc", "\0", "a\0", "('a',)", "None", "\u00e9", "e\u0301", "\ud800", "x" * 3000)
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), *zip(names, reversed(names), strict=True)]
    for tenant, salt in pairs:
        assert await engine.cache.match(CACHED[:16], Owner(tenant, salt)) == 0, (tenant, salt)
        await fill(engine, CACHED[:16], tenant, salt)
        assert await engine.cache.match(CACHED[:16], Owner(tenant, salt)) == 16
    for wrong in ({"tenant": None}, {"salt": None}, {"salt": b"a"}, {"tenant": ("a", "b")}):
        with pytest.raises(InvalidRequestError, match="namespace"):
            await engine.cache.match(CACHED, Owner(**wrong))
        with pytest.raises(InvalidRequestError, match="namespace"):
            await engine.generate(Request(CACHED, PARAMS, **wrong))


async def test_published_prefixes_are_shared(engine):
    assert await engine.cache.publish(CACHED[:32]) == 32
    await fill(engine, CACHED, tenant="a")
    assert await engine.cache.match(CACHED, Owner("b")) == 32
    assert await engine.cache.unpublish(CACHED[:32])
    assert not await engine.cache.unpublish(CACHED[:32])


async def test_reset_advice_and_tree(engine):
    await fill(engine, CACHED)
    assert str(CACHED[0]) in await engine.cache.tree(max_lines=20)
    assert await engine.cache.advice(3) == []
    await engine.cache.reset()
    assert await engine.cache.match(CACHED) == 0


@pytest.mark.parametrize("replay", [True, False])
async def test_events_follow_the_cache(engine, replay):
    await fill(engine, CACHED[:16])
    events = engine.cache.events(replay=replay)
    other = [90, *CACHED]
    residency, seen = Residency(), []

    async def follow() -> None:
        async for event in events:
            seen.append(event)
            residency(event)
            if any(run.token_ids[0] == 90 for run in event.stored):
                return

    following = asyncio.ensure_future(follow())
    await asyncio.sleep(0)
    await engine.cache.match([1])  # the subscription is there by now
    await fill(engine, other)
    await asyncio.wait_for(following, 30)
    await events.aclose()
    first = tuple(CACHED[:16])
    assert any(tokens == first for _, tokens in residency.prefixes()) == replay
    assert any(tokens[:1] == (90,) for _, tokens in residency.prefixes())
    runs = [run for event in seen for run in (*event.stored, *event.removed)]
    assert all(run.namespace == engine.cache.namespace() for run in runs)
    await fill(engine, [91, *CACHED])  # nobody listens


async def test_nodes_as_data(engine):
    await fill(engine, CACHED, tenant="a", salt="s")
    await fill(engine, [*CACHED[:32], *range(60, 70)], tenant="a", salt="s")
    await fill(engine, CACHED, tenant="b")
    snapshot = await engine.cache.nodes(tenant="a", salt="s", shown_tokens=3)
    assert snapshot.is_complete
    top, *leaves = snapshot.nodes
    assert (top.parent, top.num_tokens, list(top.token_ids)) == (None, 32, CACHED[:3])
    assert {node.parent for node in leaves} == {top.id}
    assert {(node.tenant, node.salt) for node in snapshot.nodes} == {("a", "s")}
    assert sorted(node.eviction_rank for node in leaves) == list(range(1, len(leaves) + 1))
    assert not any(node.is_pinned or node.is_held for node in snapshot.nodes)
    assert all(node.idle_s is not None and node.idle_s < 60 for node in leaves)
    everything = await engine.cache.nodes()
    assert {node.tenant for node in everything.nodes} == {"a", "b"}
    assert not everything.nodes[0].token_ids
    assert not (await engine.cache.nodes(max_nodes=1)).is_complete
    assert (await engine.cache.nodes(tenant="nobody")).nodes == []


async def test_what_a_cached_prompt_goes_on_with(engine):
    await fill(engine, CACHED, tenant="a")
    assert await engine.cache.continuation([*CACHED[:20], 90], Owner("a"), limit=4) == CACHED[20:24]
    assert await engine.cache.continuation([*CACHED[:20], 90], Owner("b")) == []


async def test_the_path_of_a_prompt_is_told_by_its_nodes(engine):
    await fill(engine, CACHED, tenant="a")
    await fill(engine, [*CACHED[:20], 90, 91], tenant="a")
    nodes = {node.id: node for node in (await engine.cache.nodes(tenant="a")).nodes}
    path = await engine.cache.path([*CACHED[:20], 90, 91], Owner("a"))
    assert [nodes[above].id for above in path[:-1]] == [nodes[node].parent for node in path[1:]]
    assert nodes[path[0]].parent is None
    assert await engine.cache.path(CACHED, Owner("b")) == []
    assert (await engine.cache.pin(CACHED, Owner("a"))).num_tokens > 0
    (pin,) = await engine.cache.pins(tenant="a")
    assert pin.node == (await engine.cache.path(CACHED, Owner("a")))[-1]


async def test_pins_have_ids_and_quotas_are_told(engine):
    await fill(engine, CACHED, tenant="a")
    assert (await engine.cache.pin(CACHED[:32], Owner("a"))).num_tokens == 32
    (pin,) = await engine.cache.pins(max_tokens=2)
    assert (list(pin.token_ids), pin.num_tokens) == (CACHED[:2], 32)
    assert not await engine.cache.unpin_id(pin.id, Owner("b"))
    assert await engine.cache.unpin_id(pin.id, Owner("a"))
    assert not await engine.cache.unpin_id(pin.id, Owner("a"))
    assert await engine.cache.put_first(CACHED, Owner("b")) == 0
    assert await engine.cache.put_first(CACHED, Owner("a")) > 0
    assert await engine.cache.quotas() == []
    assert await engine.cache.advice(tenant="a") == []


async def test_ids_of_several_engines_do_not_collide():
    engines = [ScriptedEngine(max_model_len=2048, caches=True) for _ in range(3)]
    engines += [make(num_blocks=128) for make in (paged_engine, paged_engine, paged_engine_elsewhere)]
    requests, nodes = set(), set()
    for engine in engines:
        requests |= {(await engine.generate(Request(CACHED, PARAMS))).request_id for _ in range(2)}
        nodes |= {node.id for node in (await engine.cache.nodes()).nodes}
        assert set(await engine.cache.path(CACHED)) <= nodes
        assert (await engine.cache.pin(CACHED)).node in nodes
        changes = await anext(engine.cache.events())
        assert changes.stored[0].block_ids[0] in nodes, "a node has the name of its first block"
        await engine.close()
    assert len(requests) == 2 * len(engines)
    assert len(nodes) >= len(engines)
