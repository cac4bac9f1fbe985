# SPDX-License-Identifier: Apache-2.0
"""The Redis tier: what one replica computed another loads; nothing wrong is believed, nobody waits long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nightly import by_day
from paged_language_model import make_engine, run_all
from redis_server import RedisServer, redis_server
from stateful_hash_model import BYTES_PER_STATE, StatefulHashModel
from tier_engines import GREEDY as SHORT
from tier_engines import assert_right
from tiny_models import save_tiny_model
from waiting import Clock, until

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import encode_tokens
from radixkv.engine.engine import Engine
from radixkv.entrypoints.llm import LLM
from radixkv.errors import ConfigError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.tiers.open_tiers import check_tiers
from radixkv.tiers.record import BlockKind
from radixkv.tiers.redis.owner_keys import OwnerKeys
from radixkv.tiers.redis.redis_tier import RedisTier
from radixkv.tiers.selection import Selection
from radixkv.tiers.spec import parse_tiers
from radixkv.tiers.tier import BlocksBeforeDamage, TierState

BLOCK_BYTES = 512
KIND = BlockKind("m" * 32, "float32 1x1x8x8", 8, BLOCK_BYTES)
LONG_TEXT = [1 + i * i % 90 for i in range(230)]
SECRET = b"the same on all replicas"
ADA, EVE = ("ada", "", "", "m"), ("eve", "", "", "m")


def run_of(text: int, count: int, namespace: tuple[str, ...] = ADA, *, public: bool = False) -> BlockRun:
    tokens = [text * 1000 + i for i in range(8 * count)]
    ids = tuple(b"%d/%d" % (text, i) for i in range(count))
    return BlockRun(namespace, public, encode_tokens(tokens), 0, ids)


def data_of(run: BlockRun) -> np.ndarray:
    size = 4 * run.block_size
    return np.stack(
        [
            np.frombuffer((run.tokens[i * size : (i + 1) * size] * 16)[:BLOCK_BYTES], np.uint8)
            for i in range(len(run))
        ]
    )


def state_of(tier: RedisTier, run: BlockRun) -> tuple[TierState, int]:
    """What a lookup says in the end."""
    answers: list[tuple[TierState, int]] = []

    def known() -> bool:
        answers.append(tier.lookup(run))
        return answers[-1][0] is not TierState.RETRY

    until(known)
    return answers[-1]


def loaded(tier: RedisTier, run: BlockRun) -> int:
    """How many leading blocks come, all of them right."""
    (piece,) = tier.load(run).result(60)
    assert [bytes(row) for row in piece.data] == [bytes(row) for row in data_of(run)[: len(piece.data)]]
    return len(piece.data)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def tier_of(server: RedisServer) -> Iterator[Callable[..., RedisTier]]:
    tiers = []

    def make(
        secret: bytes = SECRET,
        encrypts: bool = False,
        ttl_s: int = 100,
        kind: BlockKind = KIND,
        states: BlockKind | None = None,
    ) -> RedisTier:
        owners = OwnerKeys(kind, secret, encrypts=encrypts, states=states)
        tiers.append(RedisTier(server.url, kind, owners, ttl_s=ttl_s, states=states))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("encrypts", [False, True])
def test_what_one_saved_another_loads(server, tier_of, encrypts):
    one, other = tier_of(encrypts=encrypts), tier_of(encrypts=encrypts)
    run = run_of(1, 6)
    assert state_of(one, run) == (TierState.MISS, 0)
    assert one.wants(run) == range(6)
    one.save(run.part(0, 5), data_of(run)[:5])
    one.flush(60)
    assert one.wants(run) == range(5, 6)
    assert state_of(other, run) == (TierState.HIT, 5)
    assert other.wants(run) == range(5, 6)
    assert loaded(other, run) == 5
    assert len(server.client.keys()) == 5
    values = b"".join(server.client.get(key) for key in server.client.scan_iter())
    assert (run.tokens[:32] in values) is not encrypts
    assert all(90 < server.client.ttl(key) <= 100 for key in server.client.scan_iter())


def test_only_contiguous_prefixes_are_there(server, tier_of):
    tier, run = tier_of(), run_of(1, 6)
    tier.save(run, data_of(run))
    tier.flush(60)
    names = list(OwnerKeys(KIND, SECRET).names(run))
    assert server.client.delete(b"radixkv:kv:" + names[2].key.hex().encode()) == 1
    assert state_of(tier_of(), run) == (TierState.HIT, 2)
    assert loaded(tier_of(), run) == 2
    assert state_of(tier, run) == (TierState.HIT, 2)
    assert tier.wants(run) == range(2, 3)  # it was seen to be gone


def test_the_last_state_is_found_whatever_lies_before(tier_of):
    states = replace(KIND, kv_format="states", block_size=64)
    one, other = tier_of(states=states), tier_of(states=states)
    run = run_of(1, 40).states()
    assert run is not None
    one.save(run.part(1, 2), data_of(run)[1:2])
    one.save(run.part(3, 4), data_of(run)[3:4])
    one.flush(60)
    assert other.last(run) is None  # it does not know yet
    until(lambda: other.last(run) is not None)
    assert other.last(run) == 3
    until(lambda: other.last(run.part(0, 3)) == 1)
    until(lambda: other.last(run.part(0, 1)) == -1)
    (piece,) = other.load(run.part(3, 4)).result(60)
    assert [bytes(row) for row in piece.data] == [bytes(data_of(run)[3])]
    assert state_of(other, run_of(1, 40)) == (TierState.MISS, 0)  # a state is no K/V


def test_another_replica_resumes_at_a_state_from_redis(tier_of):
    kind = BlockKind("paged-hash", "", 8, 24 * 8)
    states = replace(kind, kv_format="states", block_size=64, block_bytes=BYTES_PER_STATE)
    for found in (0, 192):
        tier = tier_of(kind=kind, states=states)
        tier.selection = Selection(0)
        model = StatefulHashModel(64, 8, 8)
        engine, _ = make_engine(tier=tier, model=model, num_blocks=64, load_deadline_s=60)
        engine.add_request(LONG_TEXT, SHORT)
        (output,) = run_all(engine).values()
        assert_right(output)
        assert output.num_cached_tokens == found
        until(lambda: (engine.step(), engine.stats().tiers[0].saved_states)[1] or found)  # noqa: B023
        tier.flush(60)


def test_redis_evicts_the_ends_of_texts_first(server, tier_of):
    tier, run = tier_of(), run_of(1, 5)
    tier.save(run, data_of(run))
    tier.flush(60)
    assert loaded(tier, run) == 5
    keys = [b"radixkv:kv:" + name.key.hex().encode() for name in OwnerKeys(KIND, SECRET).names(run)]
    idle = [server.client.object("idletime", key) for key in keys]
    assert idle == sorted(idle)


def test_names_tell_nothing_without_the_secret(server, tier_of):
    run, keys = run_of(1, 3), set()
    for secret, namespace, public in (
        (SECRET, ADA, False),
        (SECRET, EVE, False),
        (SECRET, ("m",), True),
        (b"another secret......", ADA, False),
        (b"", ADA, False),
    ):
        found = {name.key for name in OwnerKeys(KIND, secret).names(run_of(1, 3, namespace, public=public))}
        assert len(found) == 3
        assert not keys & found
        keys |= found
    tier = tier_of()
    tier.save(run, data_of(run))
    tier.flush(60)
    assert state_of(tier_of(), run_of(1, 3, EVE)) == (TierState.MISS, 0)
    assert state_of(tier_of(b"another secret......"), run) == (TierState.MISS, 0)
    assert state_of(tier_of(kind=BlockKind("n" * 32, "float32 1x1x8x8", 8, BLOCK_BYTES)), run)[1] == 0


@pytest.mark.parametrize("encrypts", [False, True])
def test_damaged_and_swapped_values_are_never_believed(server, tier_of, encrypts):
    tier, random = tier_of(encrypts=encrypts), np.random.default_rng(3)
    for text in range(1, 13):
        run = run_of(text, 4)
        tier.save(run, data_of(run))
        tier.flush(60)
        names = list(OwnerKeys(KIND, SECRET, encrypts=encrypts).names(run))
        keys = [b"radixkv:kv:" + name.key.hex().encode() for name in names]
        bad = int(random.integers(4))
        value = bytearray(server.client.get(keys[bad]))
        how = text % 4
        if how == 0:
            value = value[: int(random.integers(len(value)))]
        elif how == 1:
            value = bytearray(server.client.get(keys[bad - 1]))
        else:
            value[int(random.integers(len(value)))] ^= 1 << int(random.integers(8))
        server.client.set(keys[bad], bytes(value))
        (piece,) = tier.load(run).result(60)
        assert isinstance(piece, BlocksBeforeDamage)
        assert [bytes(row) for row in piece.data] == [bytes(row) for row in data_of(run)[:bad]]
        assert server.client.get(keys[bad]) is None
        tier.save(run, data_of(run))  # it is written anew
        tier.flush(60)
        assert loaded(tier, run) == 4


def test_a_redis_that_dies_is_left_alone_and_found_again(server, tier_of, caplog):
    tier, run = tier_of(), run_of(1, 3)
    tier.save(run, data_of(run))
    tier.flush(60)
    server.kill()
    until(lambda: (tier.lookup(run), tier.is_up)[1] is False)
    assert tier.lookup(run) == (TierState.MISS, 0)
    assert tier.wants(run_of(2, 3)) == range(0)
    assert [len(blocks) for _, blocks in tier.load(run).result(60)] == [0]
    assert dict(tier.failures).keys() <= {"look up", "answer"}
    server.start()
    until(lambda: tier.is_up)  # nobody asks it for anything
    assert state_of(tier, run) == (TierState.MISS, 0)
    assert len([record for record in caplog.records if "K/V tier redis failed" in record.message]) == 1


def test_a_redis_without_memory_is_read_on(server, tier_of):
    tier, run = tier_of(), run_of(1, 3)
    tier.save(run, data_of(run))
    tier.flush(60)
    server.client.config_set("maxmemory", 1)
    other = run_of(2, 3)
    tier.save(other, data_of(other))
    tier.flush(60)
    assert tier.is_up
    assert loaded(tier, run) == 3
    server.client.config_set("maxmemory", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redis://localhost,secret=/no/such/file", "secret=/no/such/file: No such file"),
        ("redis://localhost,encrypt=yes", "encrypt must be on or off"),
        ("redis://localhost,ttl=0", "ttl must be 1 to"),
        ("redis://localhost:port", "write redis://HOST"),
        ("redis://localhost,size=3", "option 'size' is not known; it takes secret, encrypt, ttl, long"),
    ],
)
def test_what_does_not_work_is_said_at_once(text, message):
    with pytest.raises(ConfigError, match=message):
        check_tiers(parse_tiers([text]))


def test_a_short_secret_and_encryption_without_one_are_refused(tmp_path: Path):
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 bytes; give it at least 16"):
        check_tiers(parse_tiers([f"redis://localhost,secret={tmp_path}/secret"]))
    with pytest.raises(ConfigError, match="encrypt=on needs a secret"):
        OwnerKeys(KIND, b"", encrypts=True)


# ---------------------------------------------------------------------- with a model

PROMPTS = [[base + 7 * i % 90 for i in range(53)] for base in (5, 6, 7)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("redis"), "llama"))


def replica(model: str, server: RedisServer, secret: Path | None = None) -> LLM:
    more = f",secret={secret},encrypt=on" if secret else ""
    return LLM(model, kv_tier=f"{server.url}{more},long=0", num_blocks=32, block_size=8, threads=1)


def answer(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], GREEDY)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


@pytest.mark.parametrize("encrypts", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_two_replicas_share_what_either_computed(model, server, tmp_path, encrypts):
    secret = None
    if encrypts:
        secret = tmp_path / "secret"
        secret.write_bytes(SECRET)
    with LLM(model, num_blocks=32, block_size=8, threads=1) as plain:
        expected = [answer(plain, prompt)[0] for prompt in PROMPTS]
    with replica(model, server, secret) as one, replica(model, server, secret) as other:
        assert answer(one, PROMPTS[0]) == (expected[0], 0)
        until(lambda: (one.engine.step(), len(server.client.keys()) >= 7)[1])
        (output,) = other.generate([PROMPTS[0]], GREEDY)
        assert list(output.outputs[0].token_ids) == expected[0]
        assert output.num_cached_tokens == 48
        assert [(hit.tier, hit.num_tokens) for hit in output.tier_hits] == [("redis", 48)]
        (counts,) = other.engine.stats().tiers
        assert (counts.name, counts.hits, counts.loaded_blocks, counts.is_up) == ("redis", 1, 6, True)


@pytest.mark.parametrize("what", by_day(["hangs", "dies", "is flushed"], "dies"))
def test_answers_come_whatever_becomes_of_redis(model, server, what):
    with LLM(model, num_blocks=32, block_size=8, threads=1) as plain:
        expected = [answer(plain, prompt)[0] for prompt in PROMPTS]
    with replica(model, server) as one:
        answer(one, PROMPTS[0])
    with replica(model, server) as other:
        {"hangs": server.hang, "dies": server.kill, "is flushed": server.client.flushall}[what]()
        for prompt, tokens in zip(PROMPTS * 2, expected * 2, strict=True):
            (output,) = other.generate([prompt], GREEDY)
            assert list(output.outputs[0].token_ids) == tokens
            assert output.times.first_scheduled < 20  # 0.2 s are what it waits; the machine may be busy
        other.engine.check()
        if what != "is flushed":
            until(lambda: (answer(other, [1, *PROMPTS[1]]), other.engine.stats().tiers[0].is_up)[1] is False)
        if what == "dies":
            server.start()
        server.go_on()


# ---------------------------------------------------------------------- the deadline, by the engine's clock

TEXT = [(7 * i) % 90 + 1 for i in range(45)]


def filled_and_asked(tier_of: Callable[..., RedisTier]) -> tuple[Engine, Clock, RedisTier]:
    """An engine whose Redis has what it is asked for, its clock, which the test moves, and its tier."""
    kind = BlockKind("paged-hash", "", 8, 24 * 8)
    first, second = (tier_of(kind=kind) for _ in range(2))
    first.selection = second.selection = Selection(0)
    engine, _ = make_engine(tier=first)
    engine.add_request(TEXT, SHORT)
    run_all(engine)
    until(lambda: (engine.step(), engine.stats().transfers.saved_blocks >= 5)[1])
    first.flush(60)
    clock = Clock()
    engine, _ = make_engine(tier=second, clock=clock)
    engine.add_request(TEXT, SHORT)
    return engine, clock, second


def waited_s(engine: Engine, clock: Clock) -> float:
    """How long the request waits; each time that the engine would sleep, its whole sleep passes."""
    start = clock.now
    while True:
        finished = engine.step().finished
        engine.check()
        if finished:
            assert_right(finished[0])
            return clock.now - start
        clock.now += engine.idle_s or 0.0


@pytest.mark.parametrize("when", ["before the lookup", "before the load"])
@pytest.mark.parametrize("what", ["hangs", "is stopped"])
def test_a_request_waits_for_the_deadline_at_most(server, tier_of, what, when):
    engine, clock, tier = filled_and_asked(tier_of)
    if when == "before the load":
        # The lookup is answered; the load is asked for in the next step.
        asked = engine.cache.block_leases.missing(engine.cache.match(TEXT))
        until(lambda: tier.lookup(asked)[0] is TierState.HIT)
    {"hangs": server.hang, "is stopped": server.kill}[what]()
    assert waited_s(engine, clock) <= 0.2 + 1e-9
    for _ in range(3):  # and those that come after it are not made to wait anew, each
        engine.cache.reset()
        engine.add_request(TEXT, SHORT)
        assert waited_s(engine, clock) <= 0.2 + 1e-9


@pytest.mark.injects_faults
@pytest.mark.nightly
def test_a_redis_that_dies_under_a_load_is_told_of_once_and_counted(model, server, caplog, monkeypatch):
    """The load has been asked for when Redis dies: the tier and the engine both see that."""
    with replica(model, server) as one:
        answer(one, PROMPTS[2])
    with replica(model, server) as other:
        load = RedisTier.load

        def die(tier, run):
            server.kill()
            return load(tier, run)

        monkeypatch.setattr(RedisTier, "load", die)
        _, cached = answer(other, PROMPTS[2])
        assert cached == 0
        (counts,) = other.engine.stats().tiers
        assert (counts.errors["load"], counts.is_up) == (1, False)
        for _ in range(3):
            answer(other, PROMPTS[1])
    assert len([record for record in caplog.records if "prompts are computed instead" in record.message]) == 1
    server.start()
