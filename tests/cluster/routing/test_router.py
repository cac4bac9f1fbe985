# SPDX-License-Identifier: Apache-2.0
"""The routing policy, sentence by sentence, and that its books are always balanced."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")

from event_traffic import SECRET
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import PrefixCache
from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.events.follower import Follower
from radixkv.cluster.events.published_blocks import PublishedBlocks
from radixkv.cluster.events.replay_log import ReplayLog
from radixkv.cluster.events.wire import encode_batch, topic_of
from radixkv.cluster.routing.prompt_blocks import PromptBlocks
from radixkv.cluster.routing.replica import Replica
from radixkv.cluster.routing.router import Route, Router
from radixkv.errors import EngineOverloadedError, InvalidRequestError

KEYS = BlockKeys(SECRET)
RATE = 1000.0  # tokens a second


class Held:
    """A replica whose cache is real, and told to the router by its events."""

    def __init__(self, name: str, num_blocks: int = 1024, **options: Any) -> None:
        self.cache = PrefixCache(num_blocks, 16)
        self.replica = Replica(name, prefill_rate=RATE, **options)
        blocks, log = PublishedBlocks(16, KEYS, "none"), ReplayLog()
        self.follower = Follower(KEYS, self.replica)

        def tell(changes: Any) -> None:
            payload = encode_batch(0.0, blocks.events(changes))
            topic = topic_of("kv", f"{int.from_bytes(name.encode()):016x}"[-16:])
            self.follower.receive((topic, log.append(payload).to_bytes(8, "big"), payload))

        self.cache.subscribe(tell)

    def compute(self, tokens: list[int], namespace: str = "") -> int:
        """Serve a prompt; tokens that were cached."""
        lease = self.cache.acquire(tokens, namespace)
        lease.commit(len(tokens))
        lease.release()
        return lease.num_cached_tokens


def cluster(*held: Held) -> Router:
    router = Router(KEYS)
    for one in held:
        router.add(one.replica)
    return router


def four() -> tuple[list[Held], Router]:
    held = [Held(f"replica-{number}") for number in range(4)]
    return held, cluster(*held)


def text(seed: int, count: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def names(routes: list[Route]) -> list[str]:
    return [route.replica.name for route in routes]


def test_a_prompt_goes_where_its_prefix_is_and_the_count_is_exact() -> None:
    held, router = four()
    for number, one in enumerate(held):
        one.compute(text(number))
    for number, one in enumerate(held):
        route = router.route([*text(number), *text(99, 30)], 0.0)
        assert route.replica is one.replica
        assert route.found.tokens == 992 == one.cache.match(text(number)).num_tokens // 16 * 16
        assert route.begins_s == pytest.approx((1030 - 992) / RATE)


def test_what_is_evicted_is_not_counted_any_more() -> None:
    held, router = four()
    held[2].compute(text(0))
    held[2].cache.evict(40)
    assert router.route(text(0), 0.0).found.tokens == held[2].cache.match(text(0)).num_tokens
    held[2].cache.reset()
    assert held[2].replica.num_blocks == 0


def test_a_shared_first_block_does_not_send_all_to_one_replica() -> None:
    held, router = four()
    held[0].compute(text(0, 16))
    routes = [router.route([*text(0, 16), *text(number)], 0.0) for number in range(1, 41)]
    assert all(8 <= names(routes).count(one.replica.name) <= 12 for one in held)


def test_a_burst_of_one_new_prompt_stays_together_until_the_queue_costs_more_than_the_prefill() -> None:
    _, router = four()
    shared = text(0, 992)
    routes = [router.route([*shared, *text(number, 48)], 0.0) for number in range(1, 60)]
    together = next(i for i, route in enumerate(routes) if route.replica is not routes[0].replica)
    # 992 tokens are computed once, and then 48 for each: the 22nd would wait for more than 992 of them.
    assert 992 / 48 <= together <= 992 / 48 + 2
    assert routes[1].found.expected == 992
    assert routes[1].found.resident == 0


def test_a_burst_of_equal_prompts_stays_together() -> None:
    _, router = four()
    assert len(set(names([router.route(text(0), 0.0) for _ in range(60)]))) == 1


def test_new_prompts_spread_over_replicas_at_once() -> None:
    held, router = four()
    routes = [router.route(text(number), 0.0) for number in range(40)]
    assert all(names(routes).count(one.replica.name) == 10 for one in held)


def test_a_hot_prefix_is_computed_elsewhere_when_its_replica_is_saturated_and_not_before() -> None:
    held, router = four()
    held[1].compute(text(0))
    routes = [router.route([*text(0), *text(number, 100)], 0.0) for number in range(1, 60)]
    first = next(i for i, route in enumerate(routes) if route.replica is not held[1].replica)
    assert 992 / 108 <= first <= 992 / 108 + 2, "when its queue is as long as the prefill"
    assert len(set(names(routes[:40]))) > 1
    for route in routes:
        router.ended(route, 0.0)
    assert router.route(text(0), 0.0).replica is held[1].replica


def test_a_new_replica_gets_its_share_and_no_more() -> None:
    held, router = four()
    for number in range(12):
        for one in held:
            one.compute(text(number))
    fresh = Held("fresh")
    router.add(fresh.replica)
    routes = [router.route(text(number), 0.0) for number in range(12)]
    assert fresh.replica.name not in names(routes), "what others have is quicker there"
    routes = [router.route(text(number), 0.0) for number in range(100, 150)]
    assert names(routes).count("fresh") <= 11


def test_sessions_decide_only_where_costs_are_the_same() -> None:
    held, router = four()
    first = router.route(text(0), 0.0, session="s")
    router.ended(first, 0.0)
    for number in range(1, 6):
        again = router.route(text(number), 0.0, session="s")
        assert again.replica is first.replica
        router.ended(again, 0.0)
    other = next(one for one in held if one.replica is not first.replica)
    other.compute(text(7))
    moved = router.route(text(7), 0.0, session="s")
    assert moved.replica is other.replica, "it has the prefix"
    assert router.route(text(8), 0.0, session="s").replica is not other.replica, "it has a queue"


def test_tenants_do_not_find_each_others_blocks_but_public_ones() -> None:
    held, router = four()
    held[3].compute(text(0), "ada")
    assert router.route(text(0), 0.0, namespace="bob").found.tokens == 0
    route = router.route(text(0), 0.0, namespace="ada")
    assert (route.replica.name, route.found.tokens) == ("replica-3", 992)
    held[2].cache.publish(text(5, 512))
    held[2].compute(text(5), "ada")
    found = PromptBlocks(KEYS, text(5), "bob")
    assert held[2].replica.find(found).tokens == 512
    assert held[2].replica.find(PromptBlocks(KEYS, text(5), "ada")).tokens == 992


def test_prompts_computed_side_by_side_do_not_look_slow() -> None:
    """Four of 1,000 tokens at once, all done after four seconds: the rate is what it was."""
    held, _ = four()
    router = cluster(held[0])
    for start in range(0, 400, 4):
        routes = [router.route(text(start + i), float(start)) for i in range(4)]
        for route in routes:
            router.computed(route, start + 4 * 1000 / RATE)
            router.ended(route, start + 4 * 1000 / RATE)
    assert held[0].replica.prefill_rate == pytest.approx(RATE, rel=0.05)


def test_time_works_off_a_queue_and_first_tokens_correct_the_rate() -> None:
    held, router = four()
    router = cluster(held[0])
    route = router.route(text(0), 10.0)
    assert held[0].replica.queue_s(10.0) == pytest.approx(1.0)
    assert held[0].replica.queue_s(10.4) == pytest.approx(0.6)
    assert held[0].replica.queue_s(99.0) == 0.0
    router.computed(route, 10.5)
    assert held[0].replica.prefill_rate > RATE
    assert held[0].replica.queue_s(10.5) == 0.0
    router.ended(route, 11.0)
    assert held[0].replica.num_running == 0


def test_prompts_whose_first_token_nobody_sees_leave_the_queue_when_they_should_be_computed() -> None:
    held, _ = four()
    router, replica = cluster(held[0]), held[0].replica

    def send(number: int, now: float) -> Route:
        return router.route_prompt(router.prompt(text(number)), now, tells_first_token=False)

    first, second = send(0, 10.0), send(1, 10.0)
    assert replica.queue_s(10.0) == pytest.approx(2.0)
    assert replica.queue_s(11.5) == pytest.approx(0.5), "one after the other"
    held[0].compute(text(2))
    third = send(3, 11.5)
    assert replica.queue_s(11.5) == pytest.approx(1.5)
    held[0].compute(text(3))  # so its events say
    assert replica.queue_s(11.5) == pytest.approx(0.5)
    assert replica.queue_s(12.0) == 0.0
    assert replica.num_running == 3
    streamed, last = router.route(text(4), 12.0), send(5, 12.0)
    assert replica.queue_s(15.0) == pytest.approx(1.0), "behind one that tells, which has not told yet"
    router.computed(streamed, 15.0)
    assert replica.queue_s(15.5) == pytest.approx(0.5 * RATE / replica.prefill_rate, abs=0.5)
    for route in (first, second, third, streamed, last):
        router.ended(route, 16.0)
    assert (replica.queue_s(16.0), replica.num_running) == (0.0, 0)
    assert replica.find(router.prompt(text(0))).tokens == 0, "nothing is expected any more"


def test_closed_and_excluded_replicas_get_nothing() -> None:
    held, router = four()
    held[0].compute(text(0))
    held[0].replica.is_open = False
    route = router.route(text(0), 0.0, excluded={"replica-1", "replica-2"})
    assert route.replica is held[3].replica
    router.remove("replica-3")
    router.ended(route, 0.0)
    with pytest.raises(EngineOverloadedError, match="no replica takes requests"):
        router.route(text(0), 0.0, excluded={"replica-1", "replica-2"})
    with pytest.raises(InvalidRequestError):
        router.route(["a"], 0.0)  # type: ignore[list-item]


def test_replicas_that_may_have_gaps_are_looked_at_block_by_block() -> None:
    prompt = PromptBlocks(KEYS, text(0))
    keys = [prompt.keys(16, index)[0] for index in range(62)]
    exact, quick = Replica("exact", keeps_prefixes=False), Replica("quick")
    exact.stored([*keys[:10], *keys[11:]])
    assert exact.find(prompt).resident == 160
    quick.stored(keys[:37])
    exact.stored(keys[10:11])
    assert (exact.find(prompt).resident, quick.find(prompt).resident) == (992, 592)


def test_block_sizes_may_differ() -> None:
    router = Router(KEYS)
    for size in (8, 16, 256):
        router.add(Replica(f"of {size}", block_size=size))
    prompt = PromptBlocks(KEYS, text(0))
    router.replicas["of 256"].stored([prompt.keys(256, index)[0] for index in range(3)])
    route = router.route(text(0), 0.0)
    assert (route.replica.name, route.found.tokens) == ("of 256", 768)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 60))
def test_the_choice_is_the_least_and_the_books_balance(seed: int, num_replicas: int, num_steps: int) -> None:
    rng = random.Random(seed)
    held = [Held(f"r{number}", num_blocks=rng.choice((8, 40))) for number in range(num_replicas)]
    router = cluster(*held)
    by_name = {one.replica.name: one for one in held}
    waiting: list[tuple[Route, list[int], str]] = []
    begun: list[Route] = []
    now = 0.0
    for _ in range(num_steps):
        now += rng.choice((0.0, 0.001, 0.1))
        tokens = [*range(rng.choice((0, 20, 64))), *(rng.randrange(3) for _ in range(rng.randrange(1, 40)))]
        namespace = rng.choice(("", "ada"))
        session = rng.choice((None, "s", "t"))
        prompt = PromptBlocks(KEYS, tokens, namespace)
        costs = {}
        for one in held:
            replica = one.replica
            found = replica.find(prompt)
            exact = one.cache.match(tokens, namespace).num_tokens // 16 * 16
            assert found.resident == min(exact, len(tokens) - 1)
            assert 0 <= found.tokens < len(tokens)
            others = max(0.0, replica.queue_s(now) - found.expected / replica.prefill_rate)
            costs[replica.name] = others + (len(tokens) - found.tokens) / replica.prefill_rate
        route = router.route(tokens, now, namespace=namespace, session=session)
        assert route.cost_s == pytest.approx(costs[route.replica.name])
        assert route.cost_s <= min(costs.values()) + 0.001 + 1e-9
        waiting.append((route, tokens, namespace))
        while waiting and rng.random() < 0.5:
            done, tokens, namespace = waiting.pop(rng.randrange(len(waiting)))
            if rng.random() < 0.8:
                by_name[done.replica.name].compute(tokens, namespace)
                router.computed(done, now)
                begun.append(done)
            else:
                router.ended(done, now)
        if begun and rng.random() < 0.5:
            router.ended(begun.pop(), now)
    for route in [*begun, *(route for route, _, _ in waiting)]:
        router.ended(route, now)
    for one in held:
        assert one.replica.queue_s(now) == 0.0
        assert one.replica.num_running == 0
        assert "0 tokens to compute for 0 prompts" in repr(one.replica)
