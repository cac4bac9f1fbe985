# SPDX-License-Identifier: Apache-2.0
"""Bound the work of grammars, per answer and per tenant.

A mask is promised to take no more than `PROMISED_S`. Some take more: each answer may exceed that by
`MAX_EXCESS_S` in all, and pays it back by masks that take less. The excess of a tenant's answers is paid
from its account, which fills by a small part of the time that passes; with an empty one an answer may exceed
hardly anything, and no further grammar is compiled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: CPU time of a step's work for one row.
PROMISED_S = 300e-6
#: Excess that an answer may accumulate in all; and with an empty account.
MAX_EXCESS_S = 0.1
MAX_EXCESS_UNPAID_S = 0.003


class WorkAccount:
    """Account of CPU seconds, refilled by a share of the time that passes. Thread-safe.

    Args:
        max_s: capacity of the account; it begins full.
        share: seconds that come in each second.
        clock: seconds, monotonic.
    """

    def __init__(self, max_s: float, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_s = max_s
        self._share = share
        self._clock = clock
        self._lock = threading.Lock()
        self._balance_s = max_s
        self._seen = clock()

    def charge(self, seconds: float) -> None:
        """Take from the balance, which may become negative."""
        with self._lock:
            self._fill()
            self._balance_s -= seconds

    @property
    def is_empty(self) -> bool:
        return self.wait_s > 0.0

    @property
    def is_full(self) -> bool:
        with self._lock:
            self._fill()
            return self._balance_s >= self._max_s

    @property
    def wait_s(self) -> float:
        """Seconds until the balance is positive again."""
        with self._lock:
            self._fill()
            return max(0.0, -self._balance_s / self._share)

    def _fill(self) -> None:
        now = self._clock()
        self._balance_s = min(self._max_s, self._balance_s + (now - self._seen) * self._share)
        self._seen = now


#: Growth of an automaton while it is followed, at most: measured, 0.1 MB in each millisecond of work.
_BYTES_PER_S = 150e6


class Automaton:
    """The automaton that all answers of a compiled grammar share: it grows while they are followed.

    Args:
        num_bytes: memory that it took to compile.

    Attributes:
        is_broken: it reached a limit in one answer, so that no other answer can follow it either.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._num_bytes = num_bytes
        self._worked_s = 0.0
        self.is_broken = False

    @property
    def num_bytes(self) -> int:
        """An upper estimate of its memory."""
        return self._num_bytes + int(self._worked_s * _BYTES_PER_S)

    def grow(self, seconds: float) -> None:
        self._worked_s += seconds


class Effort:
    """Work of one answer's grammar beyond the promised time.

    Args:
        account: account charged for it; None: none.
        automaton: the automaton that the work makes grow.
    """

    __slots__ = ("_account", "_excess_s", "automaton")

    def __init__(self, account: WorkAccount | None = None, automaton: Automaton | None = None) -> None:
        self._account = account
        self._excess_s = 0.0
        self.automaton = automaton if automaton is not None else Automaton()

    def add(self, seconds: float, *, promised_s: float = 0.0) -> None:
        """Count CPU seconds, part of them promised. O(1); the account is charged for the excess."""
        self._excess_s = max(0.0, self._excess_s + seconds - promised_s)
        self.automaton.grow(seconds)
        if seconds > PROMISED_S and self._account is not None:
            self._account.charge(seconds - PROMISED_S)

    @property
    def is_too_much(self) -> bool:
        if self._excess_s <= MAX_EXCESS_UNPAID_S:
            return False
        return self._excess_s > MAX_EXCESS_S or (self._account is not None and self._account.is_empty)

    def fork(self) -> Effort:
        """Return the effort of an answer that goes on from here."""
        other = Effort(self._account, self.automaton)
        other._excess_s = self._excess_s
        return other
