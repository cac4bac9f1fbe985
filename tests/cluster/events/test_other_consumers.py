# SPDX-License-Identifier: Apache-2.0
"""Block events as others read them: by the shapes of vLLM's and SGLang's messages and by Dynamo's indexer."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="block events need the extra radixkv[events]")
pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")

import msgspec
from client_environment import EnvironmentNotMade, python_environment
from event_traffic import SECRET, CacheTraffic, keys_of
from waiting import until

from radixkv import PrefixCache
from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.events.published_blocks import PublishedBlocks
from radixkv.cluster.events.publisher import EventPublisher
from radixkv.cluster.events.replay_log import ReplayLog
from radixkv.cluster.events.spec import parse_events
from radixkv.cluster.events.wire import BlockRemoved, BlockStored, decode_batch, encode_batch

DYNAMO = Path(__file__).parents[2] / "clients" / "environments" / "dynamo.txt"
ENDPOINT = parse_events("tcp://127.0.0.1:0,tokens=all")


class Tagged(msgspec.Struct, tag=True):
    """Maps that say their type, as both engines have them."""


def event_types(name: str, *extra: tuple[str, Any, Any]) -> Any:
    """A batch of one engine: which fields its events have."""
    hashes = list[bytes | int] if name == "vllm" else list[int]
    parent = bytes | int | None if name == "vllm" else int | None
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", hashes),
            ("parent_block_hash", parent),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            *extra,
        ],
        bases=(Tagged,),
        tag=True,
    )
    removed = msgspec.defstruct(
        "BlockRemoved", [("block_hashes", hashes), ("medium", str | None)], bases=(Tagged,), tag=True
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], bases=(Tagged,), tag=True)
    return msgspec.defstruct(
        "Batch",
        [("ts", float), ("events", list[stored | removed | cleared]), ("rank", int | None, None)],
        array_like=True,
    )


VLLM = event_types("vllm", ("lora_name", str | None), ("extra_keys", list[Any] | None, None))
SGLANG = event_types("sglang", ("cache_salt", str | None, None), ("lora_name", str | None, None))


@pytest.mark.parametrize("batch_type", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_typed_decoders_read_every_batch(batch_type: Any) -> None:
    traffic = CacheTraffic(7)
    blocks = PublishedBlocks(4, BlockKeys(SECRET), "all")
    decoder = msgspec.msgpack.Decoder(batch_type)
    resident: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    seen = set()

    def follow(changes: Any) -> None:
        batch = decoder.decode(encode_batch(1.5, blocks.events(changes)))
        assert batch.ts == 1.5
        assert batch.rank == 0
        for event in batch.events:
            kind = type(event).__name__
            seen.add(kind)
            if kind == "AllBlocksCleared":
                resident.clear()
            elif kind == "BlockRemoved":
                for block_hash in event.block_hashes:
                    del resident[block_hash]
            else:
                before = event.parent_block_hash
                assert before is None or before in resident
                assert event.block_size == 4
                for i, block_hash in enumerate(event.block_hashes):
                    resident[block_hash] = (before, tuple(event.token_ids[4 * i : 4 * i + 4]))
                    before = block_hash

    traffic.cache.subscribe(follow)
    for _ in range(2000):
        traffic.step()
    assert seen == {"AllBlocksCleared", "BlockRemoved", "BlockStored"}
    assert set(resident) == keys_of(traffic.truth, BlockKeys(SECRET), 4)
    texts = []
    for block_hash in resident:
        parts, current = [], block_hash
        while current is not None:
            current, part = resident[current]
            parts.append(part)
        texts.append(tuple(token for part in reversed(parts) for token in part))
    assert sorted(texts) == sorted(tokens for _, tokens in traffic.truth.prefixes())


def test_events_as_arrays_of_older_engines_are_read() -> None:
    pack = msgspec.msgpack.encode
    stored = ["BlockStored", [1, b"two"], None, [5, 6, 7, 8], 2, None, "GPU", None, [None], 0]
    batch = pack([0.0, [stored, ["BlockRemoved", [1]], ["AllBlocksCleared"], ["NewerKind", 3]], 0])
    one, two, _ = decode_batch(batch)
    assert isinstance(one, BlockStored)
    assert (one.block_hashes, one.token_ids, one.medium) == ([1, b"two"], [5, 6, 7, 8], "GPU")
    assert isinstance(two, BlockRemoved)
    assert two.medium is None


def test_tokens_of_a_tenant_are_not_told_and_its_hashes_need_the_secret() -> None:
    def told(tokens: str, secret: bytes) -> list[BlockStored]:
        cache = PrefixCache(64, 4)
        blocks = PublishedBlocks(4, BlockKeys(secret), tokens)
        events: list[Any] = []
        cache.subscribe(lambda changes: events.extend(blocks.events(changes)))
        cache.publish(range(50, 54))
        for namespace in ((), ("ada",), ("bob",), ("", "a salt")):
            lease = cache.acquire([*range(50, 54), *range(8)], namespace or "")
            lease.commit(12)
            lease.release()
        return events

    for run in told("open", SECRET):
        assert bool(run.token_ids) == (run.cache_salt in (None, "public"))
    assert not any(run.token_ids for run in told("none", SECRET))
    everything = told("all", SECRET)
    assert all(run.token_ids for run in everything)
    labels = {run.cache_salt for run in everything}
    assert len(labels) == 5, "each has its own, and the public text"
    assert not any(name in str(label) for name in ("ada", "bob", "a salt") for label in labels)
    hashes = [one for run in everything for one in run.block_hashes]
    assert len(set(hashes)) == len(hashes), "equal texts of two tenants are not seen to be equal"
    assert not set(hashes) & {one for run in told("all", b"another secret!!") for one in run.block_hashes}


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def dynamo_indexer(block_size: int) -> Iterator[str]:
    """Dynamo's own indexer; the address of its HTTP server."""
    try:
        python = python_environment(DYNAMO)
    except EnvironmentNotMade as error:
        pytest.skip(f"Dynamo's wheel can't be had: {error}")
    port = free_port()
    command = [
        python,
        "-m",
        "dynamo.indexer",
        "--port",
        str(port),
        "--block-size",
        str(block_size),
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while True:
            try:
                ask(f"{address}/workers")
                break
            except OSError:
                assert process.poll() is None, "the indexer ended"
                assert time.monotonic() < end, "the indexer does not answer"
                time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def dynamo_blocks(address: str) -> set[int]:
    """The hashes of all blocks that the indexer believes to be there."""
    return {
        block["block_hash"]
        for index in ask(f"{address}/dump").values()
        for event in index["events"]
        for block in event["event"]["data"].get("stored", {}).get("blocks", ())
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "max_batches",
    [pytest.param(10_000, marks=pytest.mark.nightly), 3],
    ids=["replay of all", "replay of what is cached"],
)
def test_dynamos_indexer_agrees(max_batches: int) -> None:
    traffic = CacheTraffic(11, block_size=16)
    traffic.prompt = lambda: [one for base in CacheTraffic.prompt(traffic) for one in (base, base, base, 7)]  # type: ignore[method-assign]
    spec = replace(ENDPOINT, secret=SECRET)
    publisher = EventPublisher(spec, heartbeat_s=0.1, log=ReplayLog(max_batches=max_batches))

    def wanted() -> set[int]:
        return keys_of(traffic.truth, BlockKeys(SECRET), 16)

    with dynamo_indexer(16) as address, closing(publisher):
        publisher.attach(traffic.cache)
        for _ in range(300):
            traffic.step()
        worker = {
            "instance_id": 1,
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "model_name": "default",
            "block_size": 16,
        }
        ask(f"{address}/register", worker)
        for round_ in range(4):
            for _ in range(300 * round_):
                traffic.step()
            assert wanted()
            until(lambda: dynamo_blocks(address) == wanted(), 20)
        traffic.finish()
        traffic.cache.reset()
        until(lambda: not dynamo_blocks(address), 20)
