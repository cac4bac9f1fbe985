# SPDX-License-Identifier: Apache-2.0
"""Prompts that are cached and let go of, as requests before the one under test would have done."""

from __future__ import annotations

from radixkv import PrefixCache
from radixkv.cache.keys import NamespaceName


def store(cache: PrefixCache, tokens: list[int], namespace: NamespaceName = "") -> None:
    """Cache a prompt and release it."""
    lease = cache.acquire(tokens, namespace)
    lease.commit(len(tokens))
    lease.release()


def store_checked(cache: PrefixCache, tokens: list[int], namespace: NamespaceName = "") -> list[int]:
    """The same, with a check of every invariant, O(blocks); returns the block table that the prompt had."""
    lease = cache.acquire(tokens, namespace)
    lease.commit(len(tokens))
    table = lease.block_table.tolist()
    lease.release()
    cache.check()
    return table
