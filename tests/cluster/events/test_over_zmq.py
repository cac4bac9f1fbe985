# SPDX-License-Identifier: Apache-2.0
"""Publisher and follower over real sockets: exact through a relay that loses, delays, reorders and cuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="block events need the extra radixkv[events]")
pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")

import zmq
import zmq.auth
from event_traffic import SECRET, CacheTraffic, keys_of
from fuzzing import examples
from unreliable_relay import UnreliableRelay
from waiting import until

from radixkv import PrefixCache
from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.events.follower import Follower
from radixkv.cluster.events.publisher import EventPublisher
from radixkv.cluster.events.replay_log import ReplayLog
from radixkv.cluster.events.spec import EventsSpec, parse_events
from radixkv.cluster.events.subscriber import Subscriber
from radixkv.errors import ConfigError

ANYWHERE = replace(parse_events("tcp://127.0.0.1:0"), secret=SECRET)


class InsistentFollower(Follower):
    """Asks again for each replay that did not come, and counts them."""

    num_failed = 0

    def replay_failed(self) -> None:
        self.num_failed += 1
        self.lost()


@contextmanager
def following(
    spec: EventsSpec, *, replay_s: float = 0.2, follower: Follower | None = None
) -> Iterator[Follower]:
    follower = Follower(BlockKeys(SECRET)) if follower is None else follower
    subscriber = Subscriber({"one": (spec, follower)}, replay_s=replay_s)
    try:
        yield follower
    finally:
        subscriber.close()


def taken_in(publisher: EventPublisher) -> None:
    until(lambda: publisher.counts.waiting_blocks == 0)


def at(publisher: EventPublisher) -> EventsSpec:
    return replace(ANYWHERE, endpoint=publisher.endpoint, replay=publisher.replay_endpoint)


@pytest.mark.parametrize("seed", range(examples(1)))
def test_exact_after_a_bad_connection(seed: int) -> None:
    traffic = CacheTraffic(seed)
    rng = traffic.rng

    def publish() -> EventPublisher:
        log = ReplayLog(max_batches=rng.choice((4, 64, 10_000)))
        publisher = EventPublisher(ANYWHERE, heartbeat_s=0.05, log=log)
        publisher.attach(traffic.cache)
        return publisher

    publisher = publish()
    relay = UnreliableRelay(publisher.endpoint, publisher.replay_endpoint, seed)
    spec = replace(ANYWHERE, endpoint=relay.endpoint, replay=relay.replay_endpoint)
    keys = BlockKeys(SECRET)
    with closing(relay), following(spec) as follower:
        for number in range(5000):
            traffic.step()
            if number % 5 == 0:  # so that batches are not all one
                taken_in(publisher)
            if number % 2000 == 1999:  # the replica restarts, with what it has cached or without
                publisher.close()
                publisher = publish()
                relay.follow(publisher.endpoint, publisher.replay_endpoint)
        relay.be_good()
        until(lambda: follower.is_exact and follower.hashes == keys_of(traffic.truth, keys, 4))
        assert relay.num_faults > 20
        traffic.finish()
        traffic.cache.reset()
        until(lambda: not follower.hashes)
    publisher.close()


def test_who_comes_late_knows_all_at_once() -> None:
    traffic = CacheTraffic(3)
    with closing(EventPublisher(ANYWHERE, heartbeat_s=1000.0, log=ReplayLog(max_batches=2))) as publisher:
        publisher.attach(traffic.cache)
        for _ in range(200):
            traffic.step()
        with following(at(publisher)) as follower:
            until(lambda: follower.hashes == keys_of(traffic.truth, BlockKeys(SECRET), 4))
    assert traffic.truth.blocks


def test_what_is_dropped_is_told_anew() -> None:
    traffic = CacheTraffic(4)
    publisher = EventPublisher(ANYWHERE, heartbeat_s=0.05, max_waiting_blocks=1)
    with closing(publisher), following(at(publisher)) as follower:
        publisher.attach(traffic.cache)
        for _ in range(3000):
            traffic.step()
        assert publisher.counts.dropped_blocks > 0
        for _ in range(3):
            taken_in(publisher)
            publisher.after_step(traffic.cache)
        until(lambda: follower.is_exact and follower.hashes == keys_of(traffic.truth, BlockKeys(SECRET), 4))


def test_an_end_is_told_and_a_silence_is_noticed() -> None:
    traffic = CacheTraffic(5)
    for _ in range(50):
        traffic.step()
    publisher = EventPublisher(ANYWHERE, heartbeat_s=0.05)
    publisher.attach(traffic.cache)
    with closing(publisher), following(at(publisher)) as follower:
        until(lambda: bool(follower.hashes))
        publisher.close()
        publisher.close()
        until(lambda: not follower.hashes)
    silent = EventPublisher(ANYWHERE, heartbeat_s=1000.0)
    silent.attach(traffic.cache)
    follower = Follower(BlockKeys(SECRET))
    with closing(silent), closing(Subscriber({"one": (at(silent), follower)}, silence_s=0.3)):
        until(lambda: bool(follower.hashes))
        until(lambda: follower.num_forgotten > 0)


def test_a_port_in_use_is_told() -> None:
    with closing(EventPublisher(ANYWHERE)) as first:
        with pytest.raises(ConfigError, match=r"is in use; each replica needs two ports"):
            EventPublisher(replace(ANYWHERE, endpoint=first.endpoint))
        with pytest.raises(ConfigError, match=r"is in use"):
            EventPublisher(replace(ANYWHERE, replay=first.replay_endpoint))


def test_ports_are_free_again_and_nothing_runs_after_the_end() -> None:
    cache = PrefixCache(8, 4)
    publisher = EventPublisher(ANYWHERE)
    publisher.attach(cache)
    spec = at(publisher)
    publisher.close()
    again = EventPublisher(spec)
    assert again.incarnation != publisher.incarnation
    again.close()


def test_only_readers_with_a_certificate_get_in(tmp_path: Path) -> None:
    if not zmq.has("curve"):
        pytest.skip("this build of ZeroMQ has no CURVE")
    clients = tmp_path / "clients"
    clients.mkdir()
    for name in ("server", "reader", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    (tmp_path / "reader.key").rename(clients / "reader.key")
    own = f"curve={tmp_path}/server.key_secret,clients={clients}"
    spec = replace(parse_events(f"tcp://0.0.0.0:0,{own}"), secret=SECRET)
    traffic = CacheTraffic(6)
    for _ in range(50):
        traffic.step()
    with closing(EventPublisher(spec, heartbeat_s=0.05)) as publisher:
        publisher.attach(traffic.cache)

        def reader(name: str) -> EventsSpec:
            options = f"curve={tmp_path}/{name}.key_secret,server={tmp_path}/server.key"
            spec = parse_events(f"tcp://127.0.0.1:1,{options}", reads=True)
            ports = [
                endpoint.rpartition(":")[2] for endpoint in (publisher.endpoint, publisher.replay_endpoint)
            ]
            return replace(spec, endpoint=f"tcp://127.0.0.1:{ports[0]}", replay=f"tcp://127.0.0.1:{ports[1]}")

        insistent = InsistentFollower(BlockKeys(SECRET))
        with (
            following(reader("stranger")) as stranger,
            following(at(publisher)) as plain,
            following(reader("stranger"), replay_s=0.02, follower=insistent),
        ):
            with following(reader("reader")) as follower:
                until(lambda: follower.hashes == keys_of(traffic.truth, BlockKeys(SECRET), 4))
            until(lambda: insistent.num_failed >= 20)  # it waits for nobody who would take its questions
            assert stranger.incarnation is plain.incarnation is insistent.incarnation is None
