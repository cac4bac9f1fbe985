# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch: which logits an entry asks for, and where it finds them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import PrefixCache
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Entry, build_batch
from radixkv.scheduling.request import Request
from radixkv.scheduling.sequence import Sequence


def entry(cache: PrefixCache, seed: int, start: int, count: int, num_logits: int) -> Entry:
    tokens = np.random.default_rng(seed).integers(1, 1000, start + count)
    request = Sequence(Request(tokens, SamplingParams(), request_id=f"r{seed}"))
    request.lease = cache.acquire(request.tokens())
    return Entry(request, start, count, num_logits=num_logits)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 20)).flatmap(
            lambda span: st.tuples(*map(st.just, span), st.integers(0, span[1]))
        ),
        min_size=1,
        max_size=8,
    )
)
def test_each_entry_gets_the_logits_of_its_last_rows(spans):
    cache = PrefixCache(num_blocks=200, block_size=4)
    entries = [entry(cache, i, *span) for i, span in enumerate(spans)]
    batch = build_batch(entries, 4)
    found = list(batch.logit_spans())
    assert [of for of, _, _ in found] == entries
    assert found[-1][2] == len(batch.logit_rows)
    for r, (of, first, end) in enumerate(found):
        rows = batch.logit_rows[first:end]
        assert len(rows) == of.num_logits
        assert rows.tolist() == list(
            range(batch.query_starts[r + 1] - of.num_logits, batch.query_starts[r + 1])
        )


@pytest.mark.parametrize("second", [(7, 8, 2), (6, 9, 2), (7, 9, 3)])
def test_copies_of_a_step_are_grouped_so_that_none_undoes_another(second):
    """What a later copy reads or writes, an earlier one of its group has not written."""
    cache = PrefixCache(num_blocks=20, block_size=4)
    entries = [entry(cache, i, 0, 1, 0) for i in range(2)]
    entries[0].copies, entries[1].copies = [(6, 7, 3)], [second]
    groups = build_batch(entries, 4).copy_groups
    touches_target = 7 in second[:2]
    assert groups == ([[(6, 7, 3)], [second]] if touches_target else [[(6, 7, 3), second]])
