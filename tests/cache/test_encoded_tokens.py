# SPDX-License-Identifier: Apache-2.0
"""A prompt encoded once stands for its token ids in every call."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv import InvalidRequestError, PrefixCache
from radixkv.cache.keys import decode_tokens, encode_tokens, shared_bytes


@pytest.mark.parametrize("form", [list, tuple, np.asarray, lambda t: np.asarray(t, np.int32)])
def test_encoded_tokens_stand_for_the_token_ids(form: object) -> None:
    cache = PrefixCache(16, 4)
    tokens = list(range(10))
    key = cache.encode(form(tokens))  # type: ignore[operator]
    assert len(key) == 10
    assert repr(key) == "EncodedTokens(10 tokens)"
    lease = cache.acquire(key, "tenant")
    lease.commit(10)
    assert lease.token_ids() == tokens
    lease.append(cache.encode([10, 11]))
    lease.commit(12)
    lease.release()
    assert cache.match(tokens, "tenant").num_tokens == cache.match(key, "tenant").num_tokens == 10
    assert cache.match(key).num_tokens == 0
    match = cache.match(key, "tenant")
    again = cache.acquire(key, "tenant", match=match)
    assert again.num_cached_tokens == 9
    again.release()
    assert cache.pin(key, "tenant", ttl=5.0).num_tokens == 10
    assert cache.unpin(tokens, "tenant")
    assert cache.explain(key, "tenant").reason == "hit"
    cache.discard(key, "tenant")
    assert cache.match(key, "tenant").num_tokens == 0
    cache.check()


@pytest.mark.parametrize(
    "form",
    [
        *(range, array, deque, memoryview, np.asarray, torch.tensor),
        *(lambda t: t.astype(np.int64)[::-1][::-1], lambda t: t.astype(np.uint16), lambda t: t.astype(">i4")),
        *(lambda t: tuple(t), lambda t: list(t)),  # of numpy's own integers
    ],
)
def test_any_sequence_of_integers_is_a_prompt(form: Callable[..., Any]) -> None:
    tokens = array("i", [0, 1, 255, 256, 65535, 7])
    prompt = {range: lambda: range(6), array: lambda: tokens}.get(form, lambda: form(np.array(tokens)))()
    cache = PrefixCache(8, 4)
    lease = cache.acquire(prompt)
    assert lease.token_ids() == list(range(6)) if form is range else tokens.tolist()
    lease.release()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=300), st.data())
def test_shared_bytes_are_counted(tokens: list[int], data: st.DataObject) -> None:
    one = encode_tokens(tokens)
    assert decode_tokens(one) == tokens
    other = bytearray(one)
    if one and data.draw(st.booleans()):
        other[data.draw(st.integers(0, len(one) - 1))] ^= data.draw(st.integers(1, 255))
    del other[data.draw(st.integers(0, len(one))) :]
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
    assert shared_bytes(one, other) == expected


@pytest.mark.parametrize(
    "bad",
    [
        *([1, -1], np.array([1, 2**31]), "text", [[1]], np.array([-1], np.int32), [1.0, 2.0], ["1"], [True]),
        *(
            [2**31],
            [1, None],
            np.array([[1]]),
            np.array([1.5]),
            torch.tensor([-1]),
            b"bytes",
            {1, 2},
            {1: 2},
            7,
        ),
    ],
)
def test_malformed_token_ids_are_refused_when_they_are_encoded(bad: object) -> None:
    with pytest.raises(InvalidRequestError):
        PrefixCache.encode(bad)  # type: ignore[arg-type]
