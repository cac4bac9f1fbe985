# SPDX-License-Identifier: Apache-2.0
"""Names and records of blocks: what is the same is found, and nothing else is believed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import encode_tokens
from radixkv.tiers.record import (
    HEADER_BYTES,
    BlockKind,
    BlockNames,
    RecordError,
    pack_record,
    read_header,
    unpack_record,
)

KIND = BlockKind("a" * 32, "float32 3x2x8x16", 8, 256)
TOKENS = list(range(100, 140))


def run_of(tokens=TOKENS, namespace=("ada", "", "", "m"), start=0, public=False) -> BlockRun:
    count = len(tokens) // 8 - start // 8
    return BlockRun(namespace, public, encode_tokens(tokens), start, (b"",) * count)


def names(run=None, kind=KIND, secret=b"") -> list:
    return list(BlockNames(kind, secret).of(run_of() if run is None else run))


def test_a_name_does_not_depend_on_where_a_run_begins():
    assert names(run_of(start=16)) == names()[2:]
    assert len({name.key for name in names()}) == 5
    assert names(run_of(TOKENS[:24])) == names()[:3]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "b" * 32},
        {"kv_format": "int8 3x2x8x16"},
        {"block_bytes": 128},
        {"tensor_parallel": 2},
        {"computed_by": "another processor"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_blocks_of_another_kind_have_other_names(other):
    theirs = names(kind=replace(KIND, **other))
    assert not {n.key for n in theirs} & {n.key for n in names()}
    assert not {n.digest for n in theirs} & {n.digest for n in names()}


def test_names_depend_on_all_that_a_run_says():
    runs = [
        run_of(),
        run_of([1, *TOKENS[1:]]),
        run_of(namespace=("eve", "", "", "m")),
        run_of(namespace=("ad", "a", "", "m")),
        run_of(namespace=("ada", "", "adapter", "m")),
        run_of(public=True),
    ]
    keys = [name.key for run in runs for name in names(run)] + [n.key for n in names(secret=b"mine")]
    assert len(set(keys)) == len(keys)


def test_a_format_of_another_version_is_not_found(monkeypatch):
    before = names()
    head, _ = pack_record(before[0], run_of().tokens[:32], b"x" * 256)
    monkeypatch.setattr("radixkv.tiers.record.FORMAT_VERSION", 2)
    assert not set(names()) & set(before)
    with pytest.raises(RecordError, match="version"):
        read_header(head)


def test_a_record_comes_back():
    name, tokens, block = names()[1], run_of().tokens[32:64], bytes(range(256))
    data = b"".join(pack_record(name, tokens, block))
    header = read_header(data)
    assert (header.key, header.digest, header.record_bytes) == (*name, len(data))
    assert unpack_record(data, name, tokens) == block


def test_the_text_decides_not_the_key():
    """As if two texts had the same key."""
    mine, theirs = names()[0], names(run_of(list(range(40))))[0]
    tokens = run_of().tokens[:32]
    data = b"".join(pack_record(mine._replace(digest=theirs.digest), tokens, b"x" * 256))
    with pytest.raises(RecordError, match="other text"):
        unpack_record(data, mine, tokens)
    data = b"".join(pack_record(mine, encode_tokens(range(8)), b"x" * 256))
    with pytest.raises(RecordError, match="other text"):
        unpack_record(data, mine, tokens)


def test_no_flipped_bit_and_no_cut_record_is_believed():
    rng = random.Random(0)
    name, tokens, block = names()[0], run_of().tokens[:32], rng.randbytes(256)
    data = b"".join(pack_record(name, tokens, block))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError) as caught:
            unpack_record(damaged, name, tokens)
        assert caught.value.reason == ("header" if bit < HEADER_BYTES * 8 else "checksum")
    for end in range(len(data)):
        with pytest.raises(RecordError):
            unpack_record(data[:end], name, tokens)
