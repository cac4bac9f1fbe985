"""RunningRequests: who has a lease, and which of them are in the decode batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from radixkv.scheduling.batch import DecodeRows, Entry
from radixkv.scheduling.decode_batch import DecodeBatch, flush_tokens
from radixkv.scheduling.policy import tenant_of
from radixkv.scheduling.schedule_result import SchedulerStats
from radixkv.scheduling.sequence_state import SequenceState


class RunningRequests:
    """The running requests by arrival order, in the order of their admission.

    Args:
        block_size: tokens per block.
        stats: counts the steps.
    """

    def __init__(self, block_size: int, stats: SchedulerStats) -> None:
        self._block_size = block_size
        self._stats = stats
        self._requests: dict[int, SequenceState] = {}
        self._others: dict[int, SequenceState] = {}  # those that are not in the decode batch
        self._decodes = DecodeBatch(block_size)
        self._num_by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._requests.values())

    @property
    def others(self) -> Collection[SequenceState]:
        """Those that are not in the decode batch: whoever needs more than a row in a step."""
        return self._others.values()

    @property
    def num_decodes(self) -> int:
        """Requests in the decode batch."""
        return len(self._decodes)

    def num_of(self, tenant: str) -> int:
        """How many of a tenant's requests run. O(1)."""
        return self._num_by_tenant[tenant]

    def add(self, request: SequenceState) -> None:
        """A request that has been given a lease. O(1)."""
        self._num_by_tenant[tenant_of(request.namespace)] += 1
        self._requests[request.arrival_order] = self._others[request.arrival_order] = request

    def remove(self, request: SequenceState, *, tell: bool = True) -> bool:
        """Take a request out, if it is in; whether it was in the decode batch. O(1).

        Args:
            tell: tell its lease of the tokens computed without it.
        """
        was_decoding = self.leave_decodes(request, tell=tell)
        self._others.pop(request.arrival_order, None)
        if self._requests.pop(request.arrival_order, None) is not None:
            tenant = tenant_of(request.namespace)
            self._num_by_tenant[tenant] -= 1
            if not self._num_by_tenant[tenant]:
                del self._num_by_tenant[tenant]
        return was_decoding

    # ------------------------------------------------------------------ the decode batch

    def leave_decodes(self, request: SequenceState, *, tell: bool = False) -> bool:
        """Take a request out of the decode batch; whether it was in. O(1).

        Args:
            tell: tell its lease of the tokens computed without it.
        """
        was_in = self._decodes.leave(request)
        if was_in:
            request.last_scheduled_step = self._stats.num_steps - 1
            self._others[request.arrival_order] = request
        if tell:
            flush_tokens(request)
        return was_in

    def drop_full_rows(self, *, dissolve: bool) -> None:
        """Take out of the decode batch whose next token needs a block. O(rows).

        Args:
            dissolve: take out everybody: not all of them can have a token.
        """
        for request in list(self._decodes) if dissolve else self._decodes.unfit():
            self.leave_decodes(request, tell=dissolve)

    def decodes(self) -> Iterator[SequenceState]:
        """The requests of the decode batch as of now; they may leave it meanwhile."""
        return iter(self._decodes)

    def decode_rows(self) -> DecodeRows:
        """The decode batch's part of the step. O(rows)."""
        return self._decodes.rows()

    def fill_decodes(self, entries: Iterable[Entry]) -> None:
        """Put into the decode batch whose next token will have a place in the last block of its lease."""
        for entry in entries:
            request = entry.request
            if (
                entry.samples
                and not entry.draft
                and request.tokens.length % self._block_size
                and not request.shares_blocks
                and request.num_sequence_slots == 1
            ):
                del self._others[request.arrival_order]
                self._decodes.join(request)

    def continuation(
        self, request: SequenceState, num_matched: int, identity: bytes, num_whole: int
    ) -> SequenceState | None:
        """Who has generated, in the decode batch, tokens that a waiting `request` goes on with.

        Args:
            num_matched: where its cached prefix ends.
            identity, num_whole: of the whole blocks of that, and their tokens.
        """
        return self._decodes.continuation(request, num_matched, identity, num_whole)

    def check(self) -> None:
        """Assert that leases, rows and both sets agree."""
        for order, request in self._requests.items():
            assert request.arrival_order == order
            assert request.lease is not None, f"{request!r} runs without a lease"
            assert request.lease.num_tokens <= request.num_tokens
            if request not in self._decodes:
                assert request.num_computed <= request.lease.num_tokens
            assert (request in self._decodes) is not (order in self._others)
        assert len(self._decodes) + len(self._others) == len(self._requests)
        counted = Counter(tenant_of(request.namespace) for request in self._requests.values())
        assert self._num_by_tenant == counted, "the tenants' running requests are miscounted"
        self._decodes.check()
