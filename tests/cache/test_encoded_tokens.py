"""A prompt encoded once stands for its token ids in every call."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv import InvalidRequestError, PrefixCache


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


@pytest.mark.parametrize("bad", [[1, -1], np.array([1, 2**31]), "text", [[1]], np.array([-1], np.int32)])
def test_malformed_token_ids_are_refused_when_they_are_encoded(bad: object) -> None:
    with pytest.raises(InvalidRequestError):
        PrefixCache.encode(bad)  # type: ignore[arg-type]
