# SPDX-License-Identifier: Apache-2.0
"""Fingerprints beside a plain comparison of the requests themselves, and the bounds of their store."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from radixkv_server.diagnostics.fingerprint import (
    Fingerprint,
    FingerprintStore,
    FirstDifference,
    fingerprint_of,
)

NOTHING: dict[str, Any] = {"api": "chat", "model": "m", "parameters": {}}


def of(parts: dict[str, Any], ids: list[int]) -> Fingerprint:
    return fingerprint_of(np.array(ids, np.int32), **parts)


def plain_difference(one: dict[str, Any], two: dict[str, Any]) -> FirstDifference | None:
    """What `first_difference` must say, from the requests themselves."""
    if one["model"] != two["model"]:
        return FirstDifference("model")
    for part in ("tools", "system", "messages"):
        mine, its = one[part], two[part]
        if part == "messages":
            its = its[: len(mine)]
        if mine != its:
            index = 0
            while index < min(len(mine), len(its)) and mine[index] == its[index]:
                index += 1
            fresh = [summary for summary in two["summaries"] if summary not in one["summaries"]]
            return FirstDifference(part, index, part == "messages" and bool(fresh))
    for name in ("p", "q"):
        if one["parameters"].get(name) != two["parameters"].get(name):
            return FirstDifference(name)
    return None


def some_parts(rng: random.Random) -> dict[str, Any]:
    def some(count: int) -> list[Any]:
        return [{"text": rng.choice("ab")} for _ in range(rng.randrange(count))]

    messages = some(6)
    return {
        "api": "chat",
        "model": rng.choice(["m", "m", "m", "n"]),
        "tools": some(3),
        "system": some(3),
        "messages": messages,
        "parameters": {"p": rng.choice([None, "low"]), "q": rng.choice([None, {"a": 1}, {"a": 2}])},
        "summaries": [message for message in messages if message["text"] == "b" and rng.random() < 0.4],
    }


def test_the_first_difference_is_the_plain_one() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(4000):
        one, two = some_parts(rng), some_parts(rng)
        found = of(one, [1]).first_difference(of(two, [1]))
        assert found == plain_difference(one, two)
        seen.add(None if found is None else (found.part, found.compacted))
    assert {None, ("model", False), ("tools", False), ("messages", True), ("q", False)} <= seen


@pytest.mark.parametrize("seed", range(4))
def test_shared_tokens_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        one = [rng.randrange(4) for _ in range(rng.randrange(1, 80))]
        two = [*one[: rng.randrange(len(one) + 1)], *(rng.randrange(4) for _ in range(rng.randrange(1, 9)))]
        shared = 0
        while shared < min(len(one), len(two)) and one[shared] == two[shared]:
            shared += 1
        mine, its = of(NOTHING, one), of(NOTHING, two)
        assert mine.num_shared_tokens(its) == its.num_shared_tokens(mine) == shared


def test_no_text_and_no_token_is_kept() -> None:
    ids = [7001, 7002, 7003, 7001] * 8
    said = "a secret that nobody may read"
    parts = {**NOTHING, "messages": [{"role": "user", "content": said}], "parameters": {"p": said}}
    kept = of(parts, ids)
    assert not set(kept.tokens.tolist()) & set(ids)
    assert len(set(kept.tokens.tolist())) == len(ids), "equal tokens have other marks elsewhere"
    assert not re.search("secret|nobody", repr(kept))


def one_of(size: int) -> Fingerprint:
    return of(NOTHING, [1] * size)


def test_a_tenant_has_so_many_and_its_oldest_go_first() -> None:
    store = FingerprintStore(max_requests=3, max_bytes=10**9)
    for number in range(3):
        store.put("ada", f"r{number}", one_of(1))
    assert store.get("ada", "r0", "chat") is not None, "which is used now"
    store.put("ada", "r3", one_of(1))
    assert [store.get("ada", f"r{number}", "chat") is not None for number in range(4)] == [
        True,
        False,
        True,
        True,
    ]
    assert store.get("bob", "r0", "chat") is None
    assert store.get("ada", "r0", "messages") is None, "of another kind"


def test_a_tenant_has_so_many_bytes() -> None:
    each = one_of(1000).num_bytes
    store = FingerprintStore(max_requests=100, max_bytes=5 * each)
    for number in range(20):
        store.put("ada", f"a{number}", one_of(1000))
    store.put("bob", "b", one_of(1000))
    assert store.num_bytes("ada") == 5 * each
    assert [number for number in range(20) if store.get("ada", f"a{number}", "chat")] == [*range(15, 20)]
    assert store.get("bob", "b", "chat") is not None
