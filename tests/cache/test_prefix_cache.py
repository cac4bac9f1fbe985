# SPDX-License-Identifier: Apache-2.0
"""What a cache is made with, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from stored_prompts import store_checked as store

from radixkv import PrefixCache
from radixkv.errors import ConfigError


def test_importing_the_cache_imports_no_torch() -> None:
    code = "import sys; from radixkv import PrefixCache; PrefixCache(8); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_disabled_cache_matches_and_keeps_nothing() -> None:
    cache = PrefixCache(16, 4, enabled=False)
    store(cache, list(range(8)))
    assert cache.stats.free_blocks == 16
    lease = cache.acquire(list(range(8)))
    assert lease.num_cached_tokens == 0
    assert lease.report.reason == "skipped"


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 0},
        {"num_blocks": 4, "block_size": 0},
        {"num_blocks": 4, "policy": "best"},
        {"num_blocks": 4, "pin_budget": 2.0},
        {"num_blocks": 4, "ghost_blocks": -1},
        {"num_blocks": 4, "quotas": {"a": (3, None), "b": (3, None)}},
        {"num_blocks": 4, "quotas": {"a": (3, 2)}},
    ],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PrefixCache(**options)  # type: ignore[arg-type]


def test_reprs_are_one_line() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(6)))
    lease.commit(6)
    assert repr(lease) == "Lease(1: 6 tokens, 0 cached, 6 committed, 2 blocks)"
    assert "62 free, 0 cached, 2 held" in repr(cache)
    assert repr(cache.match([0, 1])) == "Match(2 of 2 tokens)"
    assert cache.tree.show().splitlines()[1].strip() == "0..6 [0 1 2 3 ..] 2 blocks, 1 refs"
    assert len(cache.tree.show(max_lines=1).splitlines()) == 2
