# SPDX-License-Identifier: Apache-2.0
"""LengthClasses: classes of sequence lengths for which a model has rotary frequencies of their own.

Keys that were turned by other frequencies fit no query, so sequences of two classes share nothing: the class
is a part of the namespace. A sequence whose answer grows out of its class is computed again in the next one,
as a preempted one is.

    0 ......... ends[0] ......... ends[1] ..... length of a sequence
      class 0   |      class 1    |  class 2
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from radixkv.cache.keys import NamespaceKey, NamespaceName, TokenIds, frame_namespace
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.reasons import Reason
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

#: Part of a namespace's key that names a class of longer sequences; keys of the shortest class end before it.
LENGTH_PART = 4
#: Bits of a position; above them is the class of its sequence.
POSITION_BITS = 32


@dataclass(frozen=True, slots=True)
class LengthClasses:
    """Classes of sequence lengths, in tokens.

    Attributes:
        ends: ascending, the longest length of each class but the last; empty: there is one class.
    """

    ends: tuple[int, ...] = ()

    def index(self, num_tokens: int) -> int:
        """Return the class of a sequence of this length. O(log classes)."""
        return bisect_left(self.ends, num_tokens)

    def end(self, num_tokens: int) -> int:
        """Return the length of the longest sequence of its class. O(log classes)."""
        index = self.index(num_tokens)
        return self.ends[index] if index < len(self.ends) else sys.maxsize

    def namespace(self, namespace: NamespaceName, num_tokens: int) -> NamespaceName:
        """Return the namespace in which the K/V of a sequence of this length is shared. O(log classes).

        >>> LengthClasses((64,)).namespace(("alice", "", "", "sha256:1f"), 65)
        ('alice', '', '', 'sha256:1f', 'longer than 64')
        """
        if not self.ends:
            return namespace
        key: NamespaceKey = frame_namespace(namespace)[:LENGTH_PART]
        index = self.index(num_tokens)
        if not index:
            return key
        return (*key, *[""] * (LENGTH_PART - len(key)), f"longer than {self.ends[index - 1]}")

    def namespaces(self, namespace: NamespaceName) -> list[NamespaceName]:
        """Return the namespaces of all classes. O(classes)."""
        return [self.namespace(namespace, end + 1) for end in (0, *self.ends)]

    def most_output(self, sequence: Sequence) -> int:
        """Return the output tokens with which a sequence has just left its class. O(log classes)."""
        return self.end(sequence.num_tokens) + 1 - sequence.num_prompt_tokens

    def move(self, sequence: Sequence, scheduler: Scheduler) -> int:
        """Queue a sequence that has left its class again, in the next one.

        Returns:
            Output tokens with which it leaves that one.
        """
        scheduler.requeue(sequence, self.namespace(sequence.namespace, sequence.num_tokens))
        return self.most_output(sequence)

    def explained(
        self, report: MissReport, cache: PrefixCache, token_ids: TokenIds, namespace: NamespaceName
    ) -> MissReport:
        """Return the report of a prompt, with the reason `length` where other classes cache more of it."""
        if report.reason not in (Reason.DIVERGED, Reason.FIRST_SEEN):
            return report
        others = [each for each in self.namespaces(namespace) if each != namespace]
        if max(cache.match(token_ids, other).num_tokens for other in others) <= report.num_hit_tokens:
            return report
        return MissReport(Reason.LENGTH, report.num_prompt_tokens, report.num_hit_tokens)

    def mark(self, batch: Batch, cache: PrefixCache) -> None:
        """Write the class of each entry's sequence above the positions of its tokens. O(tokens)."""
        classes = []
        for entry in batch.entries:
            request, report = entry.request, entry.request.cache_report
            classes.append(self.index(request.num_tokens))
            if report is not None and not request.num_output_tokens and entry.start == report.num_hit_tokens:
                request.cache_report = self.explained(report, cache, request.encoded, request.namespace)
        if any(classes):
            rows = np.repeat(np.array(classes, dtype=np.int64), np.diff(batch.query_starts))
            batch.positions = batch.positions + (rows << POSITION_BITS)


#: Of a model without such frequencies.
ONE_CLASS = LengthClasses()


def plain_positions(batch: Batch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions [T] of a batch without the classes of their sequences."""
    return batch.positions & ((1 << POSITION_BITS) - 1)
