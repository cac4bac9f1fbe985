# SPDX-License-Identifier: Apache-2.0
"""RunningRequests: the requests with a lease, and the decodes among them that need nothing from the cache.

In fifteen of sixteen decode steps, a request's token goes to the last block of its lease, which exists
already and is unshared. Such a request is a row: its entry is kept from step to step, and only its position
changes. Its lease gets the tokens all together (`flush_tokens`) in three cases: the block is full and the row
needs a new one, the row is dissolved, or another request's prompt goes on with just these tokens
(`continuation`). So with a thousand decodes the cache is called for about sixty of them in a step.

    tokens of a row's request
    0 ............ lease.num_tokens ............ num_computed . num_tokens
    |  committed, shareable    |  K/V is there; the lease  |  to compute in
    |                          |  does not know yet        |  this step
                                <-- inside the lease's last block -->
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from radixkv.errors import OutOfBlocks
from radixkv.scheduling.batch import Entry
from radixkv.scheduling.in_flight_prefixes import PrefixKey, prefix_key
from radixkv.scheduling.policy import tenant_of
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.step_plan import SchedulerStats


class RunningRequests:
    """The running requests by arrival order, in the order of their admission.

    Args:
        block_size: tokens per block.
        stats: counts the steps.
    """

    def __init__(self, block_size: int, stats: SchedulerStats) -> None:
        self._block_size = block_size
        self._stats = stats
        self._requests: dict[int, Sequence] = {}
        self._rows: dict[int, Entry] = {}
        self._without_row: dict[int, Sequence] = {}  # requests without a row
        # The key of each row's committed tokens, and rows by that key.
        self._committed: dict[int, PrefixKey] = {}
        self._by_committed: dict[PrefixKey, dict[int, Sequence]] = {}
        self._num_by_tenant: Counter[str] = Counter()
        self._background: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._requests.values())

    @property
    def without_row(self) -> Collection[Sequence]:
        """Running requests that are no rows: prompts in progress, and decodes that need the cache."""
        return self._without_row.values()

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def num_of(self, tenant: str) -> int:
        """Number of a tenant's running requests. O(1)."""
        return self._num_by_tenant[tenant]

    @property
    def background(self) -> Collection[Sequence]:
        """Running background requests in the order of their admission."""
        return self._background.values()

    def num_foreground_of(self, tenant: str) -> int:
        """Number of a tenant's running requests without background requests. O(background requests)."""
        return self._num_by_tenant[tenant] - sum(
            tenant_of(request.namespace) == tenant for request in self._background.values()
        )

    def num_by_tenant(self, without: Iterable[Sequence]) -> dict[str, int]:
        """Number of running requests of each tenant, 0 included, without some and without background ones.

        O(tenants + requests that are left out + background requests).
        """
        counts = dict(self._num_by_tenant)
        for request in self._background.values():
            counts[tenant_of(request.namespace)] -= 1
        for request in without:
            if not request.is_background:
                counts[tenant_of(request.namespace)] -= 1
        return counts

    def add(self, request: Sequence) -> None:
        """Add a request that has got a lease. O(1)."""
        self._num_by_tenant[tenant_of(request.namespace)] += 1
        self._requests[request.arrival_order] = self._without_row[request.arrival_order] = request
        if request.is_background:
            self._background[request.arrival_order] = request

    def remove(self, request: Sequence, *, flush: bool = True) -> bool:
        """Take a request out, if it is in; return True if it was a row. O(1).

        Args:
            flush: give its lease the tokens computed without it.
        """
        was_row = self.drop_row(request, flush=flush)
        self._without_row.pop(request.arrival_order, None)
        self._background.pop(request.arrival_order, None)
        if self._requests.pop(request.arrival_order, None) is not None:
            tenant = tenant_of(request.namespace)
            self._num_by_tenant[tenant] -= 1
            if not self._num_by_tenant[tenant]:
                del self._num_by_tenant[tenant]
        return was_row

    # ------------------------------------------------------------------ rows

    def make_rows(self, entries: Iterable[Entry]) -> None:
        """Make rows of the requests whose next token has a place in the last block of their lease.

        None of them shares blocks with forks, so operations on other leases don't change its block table.
        """
        for entry in entries:
            if entry.samples and not entry.draft:
                self._make_row(entry.request, entry.request.num_tokens)

    def _make_row(self, request: Sequence, end: int) -> None:
        """Make a row of a request whose lease has `end` tokens, if its last block has room for one more."""
        size, lease = self._block_size, request.lease
        if not end % size or request.shares_blocks or request.num_sequence_slots > 1:
            return
        assert lease is not None
        del self._without_row[request.arrival_order]
        row = Entry(request, start=end, count=1, samples=True, num_logits=1)
        self._rows[request.arrival_order] = row
        self._place(row)
        self._note_committed(request, prefix_key(request, *lease.cached_identity, end))

    def _place(self, row: Entry) -> None:
        """Let a row write to the last block of its lease."""
        assert row.request.lease is not None
        row.block_table = table = row.request.lease.block_table
        row.slot_offset = (int(table[-1]) - (len(table) - 1)) * self._block_size

    def _next_block(self, row: Entry) -> bool:
        """Give a row whose block is full a new one; False: there is none."""
        request, start = row.request, row.start
        flush_tokens(request)
        lease = request.lease
        assert lease is not None
        try:
            lease.reserve(start + 1)
        except OutOfBlocks:
            return False
        self._place(row)
        namespace, _, _ = self._forget_committed(request)
        identity, _ = lease.cached_identity
        self._note_committed(request, (namespace, identity, b""))
        return True

    def _note_committed(self, request: Sequence, key: PrefixKey) -> None:
        self._committed[request.arrival_order] = key
        self._by_committed.setdefault(key, {})[request.arrival_order] = request

    def _forget_committed(self, request: Sequence) -> PrefixKey:
        key = self._committed.pop(request.arrival_order)
        alike = self._by_committed[key]
        del alike[request.arrival_order]
        if not alike:
            del self._by_committed[key]
        return key

    def update_rows(self, entries: Iterable[Entry]) -> None:
        """Bring rows up to date whose requests got their token while the next step runs already. O(entries).

        A full row is dissolved. A request whose step was planned ahead in a new block becomes a row there.
        """
        rows, size = self._rows, self._block_size
        for entry in entries:
            request = entry.request
            lease, end = request.lease, request.num_computed
            if lease is None:
                continue
            if request.arrival_order in rows:
                if end >= lease.num_blocks * size:
                    self.drop_row(request, flush=True)
            elif lease.num_tokens < end:
                flush_tokens(request)
                self._make_row(request, end)

    def drop_row(self, request: Sequence, *, flush: bool = False) -> bool:
        """Dissolve a request's row; return True if there was one. O(1).

        Args:
            flush: give its lease the tokens computed without it.
        """
        row = self._rows.pop(request.arrival_order, None)
        if row is not None:
            request.last_scheduled_step = self._stats.num_steps - 1
            self._without_row[request.arrival_order] = request
            self._forget_committed(request)
        if flush:
            flush_tokens(request)
        return row is not None

    def refresh_rows(self, *, dissolve: bool) -> None:
        """Prepare the rows for a step: those whose block is full get a new one. O(rows).

        A row is dissolved if the step is no plain decode for it, or if it gets no block: requests without a
        row may have to be preempted for blocks.

        Args:
            dissolve: dissolve all rows: the budget is too small for all of them.
        """
        full, others, size = [], [], self._block_size
        starts = [row.request.num_computed for row in self._rows.values()]
        for row, start in zip(self._rows.values(), starts, strict=True):
            row.start = start
            if dissolve or start + 1 != row.request.num_tokens:
                others.append(row.request)
            elif not start % size:
                full.append(row)
        others += [row.request for row in full if not self._next_block(row)]
        for request in others:
            self.drop_row(request, flush=dissolve)

    def rows(self) -> list[Entry]:
        """Return the rows: once those whose block is full have left, the step's decodes."""
        return list(self._rows.values())

    def continuation(
        self, request: Sequence, num_matched: int, identity: bytes, num_whole: int
    ) -> Sequence | None:
        """Return the row that goes on where a waiting request's cached prefix ends. O(1) if there is none.

        Args:
            num_matched: tokens of that prefix.
            identity, num_whole: of its whole blocks, and their tokens.

        Of several, it is the one that agrees with the request for the most tokens.
        """
        if not num_matched or num_matched >= request.most_found:
            return None
        tokens = request.tokens()
        found = self._by_committed.get(prefix_key(request, identity, num_whole, num_matched))
        if found is None:
            return None
        best, longest = None, 0
        for other in found.values():
            end = min(other.num_tokens, len(tokens))
            if end - num_matched <= longest:
                continue
            theirs = other.tokens(num_matched, end)
            if theirs[0] != tokens[num_matched]:
                continue
            differ = theirs != tokens[num_matched:end]
            agree = int(differ.argmax()) if differ.any() else len(theirs)
            if agree > longest and np.array_equal(other.tokens(0, num_matched), tokens[:num_matched]):
                best, longest = other, agree
        return best

    def check(self) -> None:
        """Assert that leases, rows and counts agree."""
        for order, request in self._requests.items():
            lease = request.lease
            assert request.arrival_order == order
            assert lease is not None, f"{request!r} runs without a lease"
            assert lease.num_tokens <= request.num_tokens
            row = self._rows.get(order)
            assert (row is None) is (order in self._without_row)
            if row is None:
                assert request.num_computed <= lease.num_tokens
            else:
                assert row.request is request
                table = row.block_table
                assert table is not None
                assert np.array_equal(lease.block_table, table), f"{request!r}: another block table"
                end = len(table) * self._block_size
                assert end - self._block_size < request.num_computed <= end
                assert lease.num_tokens <= request.num_computed
        assert len(self._rows) + len(self._without_row) == len(self._requests)
        assert sum(len(alike) for alike in self._by_committed.values()) == len(self._rows)
        counted = Counter(tenant_of(request.namespace) for request in self._requests.values())
        assert self._num_by_tenant == counted, "the tenants' running requests are miscounted"
        assert self._background == {k: one for k, one in self._requests.items() if one.is_background}


def flush_tokens(request: Sequence) -> None:
    """Give the lease all tokens that were computed without it. O(those tokens), at most a block.

    They lie in its last block, or one that is reserved, so this never needs another one.
    """
    lease = request.lease
    if lease is not None and lease.num_tokens < request.num_computed:
        lease.append(request.encoded_part(lease.num_tokens, request.num_computed))
        lease.commit(request.num_computed)
