# SPDX-License-Identifier: Apache-2.0
"""A namespace's key says whose K/V it is and what computes it; what computes alike shares public text."""

from __future__ import annotations

import random

import pytest
from paged_language_model import make_engine, run_all
from stored_prompts import store_checked as store

from radixkv import InvalidRequestError, PrefixCache
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cache.reporting.tree_walk import TreeWalk
from radixkv.sampling.sampling_params import SamplingParams

TEXT = list(range(40))


def test_public_text_of_one_adapter_or_model_is_never_found_under_another() -> None:
    cache = PrefixCache(200, 4)
    assert cache.publish(TEXT, ("", "", "poet", "m1")) == 40
    store(cache, [*TEXT, 1, 2], ("ada", "", "poet", "m1"))
    assert cache.match(TEXT, ("bob", "salt", "poet", "m1")).num_tokens == 40
    for adapter, model in (("", "m1"), ("cook", "m1"), ("poet", "m2"), ("m1", "poet"), ("poetm1", "")):
        stranger = ("ada", "", adapter, model)
        assert cache.match(TEXT, stranger).num_tokens == 0
        assert cache.explain(TEXT, stranger).reason == "first_seen"
        store(cache, [*TEXT, 3], stranger)
        cache.check()
    assert not cache.unpublish(TEXT, ("", "", "cook", "m1"))
    assert cache.unpublish(TEXT, ("x", "y", "poet", "m1"))


def test_public_text_of_several_models_is_explained_evicted_and_declared_apart() -> None:
    cache = PrefixCache(64, 4)
    keys = [("ada", "", "", model) for model in ("m1", "m2")]
    for key in keys:
        cache.publish(TEXT, key)
        store(cache, TEXT, key)
    assert cache.stats.cached_blocks == 20
    fresh = cache.rebuilt()
    assert len(fresh.declared.public_prefixes) == 2
    store(fresh, TEXT, keys[0])
    assert fresh.match(TEXT, ("bob", "", "", "m1")).num_tokens == 40
    assert fresh.match(TEXT, ("bob", "", "", "m2")).num_tokens == 0
    fresh.evict(64)
    assert fresh.explain(TEXT, ("bob", "", "", "m1")).reason == "evicted"
    assert fresh.explain(TEXT, ("bob", "", "", "m2")).reason == "first_seen"


def test_equal_text_has_other_identities_wherever_the_key_differs() -> None:
    cache = PrefixCache(400, 4)
    seen: list[BlockChanges] = []
    cache.subscribe(seen.append)
    keys = [
        ("ab", "c"),
        ("a", "bc"),
        ("ab", "c", ""),
        ("ab", "c", "", ""),
        ("abc",),
        ("ab", "", "c"),
        ("", "", "ab"),
    ]
    for key in keys:
        store(cache, TEXT, key)
    cache.publish(TEXT)
    store(cache, [*TEXT, *TEXT], "one")
    store(cache, [*TEXT, *TEXT], "two")
    hashes = [name for changes in seen for run in changes.stored for name in run.block_hashes]
    assert len(set(hashes)) == len(hashes) == 10 * (len(keys) + 1 + 2)


def test_a_cache_of_a_model_completes_the_keys_that_name_less() -> None:
    cache = PrefixCache(64, 4, model="m1", quotas={"ada": (0, 20)})
    store(cache, TEXT, "ada")
    for name in (("ada",), ("ada", ""), ("ada", "", ""), ("ada", "", "", "m1")):
        assert cache.match(TEXT, name).num_tokens == 40
        assert cache.ceiling(name) == 20
    for call in (cache.match, cache.acquire, cache.explain, cache.pin, cache.unpin, cache.publish):
        with pytest.raises(InvalidRequestError, match="names the model 'm2', but this one is 'm1'"):
            call(TEXT, ("ada", "", "", "m2"))
    assert cache.pin(TEXT, "ada").num_tokens == 40
    assert cache.pins()[0].namespace == ("ada", "", "", "m1")
    assert cache.unpin(TEXT, ("ada", "", "", "m1"))


def test_the_engine_builds_the_whole_key_for_everyone() -> None:
    engine, model = make_engine(num_blocks=64, model_fingerprint="m1")
    for name in ("ada", ("ada", ""), ("ada", "", "", "m1")):
        engine.add_request(TEXT, SamplingParams(temperature=0.0, max_tokens=1), namespace=name)
        run_all(engine)
    assert model.num_computed == len(TEXT) + 2, "one token of each repetition"
    assert {node.namespace for node in _nodes(engine.cache)} == {("ada", "", "", "m1")}


def test_an_engine_computes_nothing_under_the_name_of_another_model() -> None:
    engine, _ = make_engine(num_blocks=64, model_fingerprint="m1")
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for name in (("ada", "", "", "m2"), ("ada", "", "", ""), ("ada", "", "m1", "m2", "m1")):
        with pytest.raises(InvalidRequestError, match="model"):
            engine.add_request(TEXT, params, namespace=name)
    assert not engine.has_work


PARTS = ["", "a", "b", "ab", "a\x00", "\x00", "\x01\0\0\0\0\0\0\0a", "m1", "\ud800", "é"]


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_of_parts_finds_what_another_key_cached_or_published(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(2000, 4)
    keys = {tuple(rng.choice(PARTS) for _ in range(rng.choice([1, 2, 3, 4, 4, 4, 5]))) for _ in range(40)}
    first, *others = sorted(keys, key=lambda key: (len(key) < 4, rng.random()))
    cache.publish(TEXT, first)
    store(cache, [*TEXT, 1, 2, 3, 4], first)
    for key in others:
        is_shared = key[2:] == first[2:]
        assert cache.match([*TEXT, 1, 2, 3, 4], key).num_tokens == (40 if is_shared else 0)
        assert (cache.pin(TEXT, key) is not None) == is_shared
        assert not cache.tree.continuation(TEXT, key), "what others cached is not told"
    for key in others:
        cache.unpin(TEXT, key)
        if key[2:] != first[2:]:
            store(cache, TEXT, key)
    hashes = [node.namespace for node in _nodes(cache)]
    assert len(set(hashes)) == len(hashes), "one run for each, the public one included"
    cache.check()


def _nodes(cache: PrefixCache) -> list:
    walk = TreeWalk(cache.tree)
    walk.advance()
    return walk.nodes()
