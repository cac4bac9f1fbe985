# SPDX-License-Identifier: Apache-2.0
"""Identities of blocks are what their definition says, however many are computed at once."""

from __future__ import annotations

import random

import pytest
import xxhash

from radixkv.cache.block_identity import BlockIdentities, each_identity


@pytest.mark.parametrize("block_bytes", [4, 20, 64])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 63, 64, 65, 128, 300])
def test_a_chain_follows_block_by_block(block_bytes: int, num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    identities = BlockIdentities(block_bytes)
    key, before = rng.randbytes(num_blocks * block_bytes + 3), rng.randbytes(16)
    expected, last = [], before
    for start in range(0, num_blocks * block_bytes, block_bytes):
        last = xxhash.xxh3_128_digest(last + key[start : start + block_bytes])
        expected.append(last)
    chained = identities.chain(before, bytearray(key))
    assert each_identity(chained) == tuple(expected)
    assert identities.of_tokens(before, key[: num_blocks * block_bytes]) == last
    assert identities.of_tokens(before, key) == xxhash.xxh3_128_digest(last + key[-3:])
