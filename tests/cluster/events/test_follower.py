# SPDX-License-Identifier: Apache-2.0
"""A follower knows exactly what a replica holds, or forgets it, whatever happens to the messages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")

from event_traffic import SECRET, CacheTraffic, keys_of
from fuzzing import examples
from paged_language_model import make_engine, run_all
from stateful_hash_model import StatefulHashModel

from radixkv.cache.reporting.events import BlockChanges
from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.events.follower import Follower
from radixkv.cluster.events.published_blocks import PublishedBlocks
from radixkv.cluster.events.replay_log import ReplayLog
from radixkv.cluster.events.wire import END, AllBlocksCleared, encode_batch, topic_of
from radixkv.cluster.routing.replica import Replica as RoutedReplica
from radixkv.cluster.routing.router import Router
from radixkv.sampling.sampling_params import SamplingParams


class Keys:
    """A watcher: the keys it was told of."""

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def stored(self, keys: Sequence[int]) -> None:
        assert not self.keys & set(keys)
        self.keys.update(keys)

    def removed(self, keys: Sequence[int]) -> None:
        assert self.keys >= set(keys)
        self.keys.difference_update(keys)

    def cleared(self) -> None:
        self.keys.clear()


class Replica:
    """What a publisher says, without sockets."""

    def __init__(self, traffic: CacheTraffic, incarnation: str, log: ReplayLog | None = None) -> None:
        self.topic = topic_of("kv", incarnation) if incarnation else b"kv"
        self.blocks = PublishedBlocks(traffic.cache.block_size, BlockKeys(SECRET), "all")
        self.log = log or ReplayLog()
        self.sent: list[tuple[bytes, bytes, bytes]] = []
        traffic.cache.subscribe(self.tell)

    def tell(self, changes: BlockChanges) -> None:
        self.beat(encode_batch(0.0, self.blocks.events(changes)))

    def beat(self, payload: bytes | None = None) -> None:
        payload = payload or encode_batch(0.0, [])
        self.sent.append((self.topic, self.log.append(payload).to_bytes(8, "big"), payload))

    def replay(self, start: int) -> list[tuple[bytes, bytes, bytes]]:
        if start < self.log.first_sequence:
            last = self.log.next_sequence - 1
            found = [(last, encode_batch(0.0, self.blocks.snapshot()))] if last >= 0 else []
        else:
            found = list(self.log.since(start))
        return [(self.topic, number.to_bytes(8, "big"), payload) for number, payload in found]


def replay_missing(follower: Follower, replica: Replica) -> None:
    """Nothing gets lost any more: a heartbeat, and as many replays as are asked for."""
    replica.beat()
    follower.receive(replica.sent[-1])
    for _ in range(4):
        if follower.wanted is None:
            return
        for message in replica.replay(follower.wanted):
            follower.replayed(message)
        follower.replayed((b"", END, b""))
    assert follower.wanted is None


@pytest.mark.parametrize("seed", range(examples(6)))
def test_exact_whatever_is_lost_late_twice_or_out_of_order(seed: int) -> None:
    rng = random.Random(seed)
    traffic = CacheTraffic(seed)
    names = iter(f"{number:016x}" for number in range(1, 10_000))
    replica = Replica(traffic, next(names), ReplayLog(max_batches=rng.choice((2, 8, 10_000))))
    watcher = Keys()
    keys = BlockKeys(SECRET if rng.random() < 0.5 else b"of the router alone, another one")
    follower = Follower(keys, watcher)
    late: list[tuple[bytes, bytes, bytes]] = []
    for _ in range(2500):
        traffic.step()
        fresh, replica.sent = replica.sent, []
        for message in fresh:
            fate = rng.random()
            if fate < 0.85:
                follower.receive(message)
            if fate > 0.80 and fate < 0.95:  # some come twice
                late.append(message)
        if late and rng.random() < 0.3:
            follower.receive(late.pop(rng.randrange(len(late))))
        if follower.wanted is not None and rng.random() < 0.2:
            for message in replica.replay(follower.wanted):
                if rng.random() < 0.9:
                    follower.replayed(message)
            if rng.random() < 0.9:
                follower.replayed((b"", END, b""))
        if rng.random() < 0.002:
            follower.lost()
        if rng.random() < 0.002:  # the replica is another one, and its cache empty
            traffic = CacheTraffic(rng.randrange(1 << 30))
            replica = Replica(traffic, next(names), ReplayLog(max_batches=rng.choice((2, 8, 10_000))))
        if rng.random() < 0.02:
            replay_missing(follower, replica)
            assert follower.hashes == keys_of(traffic.truth, BlockKeys(SECRET), 4)
            if keys.owner(("",)) == BlockKeys(SECRET).owner(("",)):
                assert watcher.keys == follower.hashes
    replay_missing(follower, replica)
    assert follower.hashes == keys_of(traffic.truth, BlockKeys(SECRET), 4)
    traffic.finish()
    traffic.cache.reset()
    replay_missing(follower, replica)
    assert not follower.hashes
    assert not watcher.keys


def test_engines_without_incarnations_are_forgotten_when_what_is_missing_is_gone() -> None:
    traffic = CacheTraffic(1)
    replica = Replica(traffic, "", ReplayLog(max_batches=3))
    follower = Follower(BlockKeys(SECRET))
    follower.replay_failed()  # it has none
    while replica.log.next_sequence < 30:
        traffic.step()
    for message in replica.sent[:20]:
        follower.receive(message)
    known = follower.hashes
    assert known
    follower.receive(replica.sent[28])
    assert follower.wanted == 20
    assert follower.hashes == known, "until it is clear that it can't be had"
    follower.replay_failed()
    assert follower.num_forgotten == 1
    assert follower.hashes <= keys_of(traffic.truth, BlockKeys(SECRET), 4) | known
    follower.receive(replica.sent[29])
    assert follower.wanted is None
    follower.disconnected()
    assert not follower.hashes


def test_what_begins_with_a_clearing_needs_nothing_before_it() -> None:
    follower = Follower(BlockKeys(SECRET))
    topic = topic_of("kv", "0" * 16)
    follower.receive((topic, (7).to_bytes(8, "big"), encode_batch(0.0, [AllBlocksCleared()])))
    assert follower.is_exact


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (b"kv",),
        (b"kv", b"1", b""),
        (b"kv", bytes(8), b"\xc1"),
        (b"kv", bytes(8), b"\x00"),
        (b"", b"", b"", b""),
    ],
)
def test_what_is_no_message_changes_nothing(frames: tuple[bytes, ...]) -> None:
    follower = Follower(BlockKeys(SECRET))
    follower.receive(frames)
    follower.replayed(frames)
    assert not follower.hashes


def test_a_router_scores_what_a_model_with_states_can_resume() -> None:
    rng = random.Random(5)
    model = StatefulHashModel(60, 16, 5)
    engine, _ = make_engine(num_blocks=60, block_size=16, budget=200, model=model, max_num_seqs=2)
    blocks = PublishedBlocks(16, BlockKeys(SECRET), "all")
    replicas = [RoutedReplica(name, block_size=16) for name in ("early", "late")]
    followers = [Follower(BlockKeys(SECRET), replica) for replica in replicas]
    router, topic, sent = Router(BlockKeys(SECRET)), topic_of("kv", "a" * 16), 0

    def tell(changes: BlockChanges) -> None:
        nonlocal sent
        followers[0].receive((topic, sent.to_bytes(8, "big"), encode_batch(0.0, blocks.events(changes))))
        sent += 1

    engine.cache.subscribe(tell)
    texts = [[rng.randrange(1, 4) for _ in range(300)] for _ in range(3)]
    found = []
    for turn in range(60):
        tenant, text = rng.choice(("", "ada")), rng.choice(texts)
        prompt = text[: rng.randrange(1, 300)] + [rng.randrange(1, 4) for _ in range(rng.randrange(30))]
        engine.add_request(prompt, SamplingParams(max_tokens=3), namespace=tenant)
        run_all(engine)
        if turn % 20 == 19:
            engine.cache.evict(20)
        if turn == 40:
            engine.cache.reset()
        whole = encode_batch(0.0, blocks.snapshot())
        followers[1].receive((topic, turn.to_bytes(8, "big"), whole))
        for other in texts:
            match = engine.cache.match(other, tenant)
            for replica in replicas:
                assert replica.find(router.prompt(other, tenant)).resident == match.resume
            found.append((match.resume, match.num_tokens))
    assert any(resume for resume, _ in found)
    assert any(resume < num_tokens - 64 for resume, num_tokens in found), "no state has gone before its K/V"
