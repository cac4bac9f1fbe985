# SPDX-License-Identifier: Apache-2.0
"""Compiled grammars, and their logits processor, which masks the tokens that a grammar does not allow."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Self

import llguidance
import numpy as np
import torch

from radixkv.errors import InvalidRequestError, RequestFailedError
from radixkv.grammar.trial import first_line
from radixkv.grammar.vocabulary import Bitmasks, Vocabulary
from radixkv.grammar.work import MAX_EXCESS_S, PROMISED_S, Automaton, Effort, WorkAccount
from radixkv.sampling.logits_processors import MinTokens, TokenMask

#: [256, 8]: for each byte of a mask, the upper bound of the logits of its eight tokens.
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)


#: Error of a request ended for the work of its grammar.
_TOO_MUCH = (
    f"its masks take more than {PROMISED_S * 1e6:.0f} us of CPU time each, and {MAX_EXCESS_S * 1e3:.0f} ms "
    "in all beyond that, or less where your grammars have used their CPU time up; simplify the grammar"
)


class GrammarMask(TokenMask):
    """Masks every token that the grammar does not allow next, and ends the output where it is complete.

    Args:
        matcher: at the beginning of the grammar; it belongs to this object from now on.
        withheld: end tokens ruled out at first, as long as the grammar allows other tokens; None: none.
        effort: counts the matcher's work; too much of it is a failure.
    """

    prepares = True
    stage = 4

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        withheld: MinTokens | None,
        effort: Effort,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._withheld = withheld
        self._effort = effort
        self._num_ends = 0  # end tokens at the end of the output, which the matcher never gets
        self._mask: Bitmasks | None = None  # for the next token, once it is computed
        self._is_slow = False  # it belonged to a group of masks that was slow
        self._failure: str | None = None  # the reason why a mask was emptied

    @property
    def is_active(self) -> bool:
        return True

    @property
    def is_complete(self) -> bool:
        return self._num_ends > 0 or (self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def failure(self) -> str | None:
        # The account may have filled again since a mask was emptied for it.
        if self._failure is not None:
            return self._failure
        if self._matcher.is_error():
            return f"the grammar can't go on: {first_line(self._matcher)}"
        return f"the grammar can't go on: {_TOO_MUCH}" if self._effort.is_too_much else None

    def forced_tokens(self) -> list[int]:
        if self._num_ends or self.failure is not None:
            return []
        started = time.thread_time()
        forced = [int(token) for token in self._matcher.compute_ff_tokens()]
        self._effort.add(time.thread_time() - started)
        return forced

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if self._num_ends:
            return 0
        # A matcher that is asked about an id beyond its vocabulary is in error from then on.
        ends, size = self._vocabulary.end_token_ids, self._vocabulary.size
        before_end = next(
            (i for i, token in enumerate(token_ids) if token in ends or not 0 <= token < size),
            len(token_ids),
        )
        started = time.thread_time()
        count = int(self._matcher.validate_tokens(list(token_ids[:before_end])))
        self._effort.add(time.thread_time() - started)
        return count

    @classmethod
    def prepare(cls, processors: Sequence[Self]) -> None:
        """Find the masks of all processors, the quick ones in one call.

        10 us each for JSON, up to 300 us for others; what takes more is counted against its request.
        """
        new = [processor for processor in processors if processor._mask is None]
        alone = [processor for processor in new if processor._is_slow or len(new) == 1]
        together = [processor for processor in new if not (processor._is_slow or len(new) == 1)]
        if together:
            vocabulary = together[0]._vocabulary
            started = time.perf_counter()
            masks = vocabulary.masks([processor._matcher for processor in together])
            rounds = -(-len(together) // vocabulary.masks_at_once)
            taken = time.perf_counter() - started
            are_slow = taken > rounds * PROMISED_S  # next time each is computed and timed alone
            for processor, mask in zip(together, masks, strict=True):
                processor._is_slow = are_slow
                processor._effort.add(0.0, promised_s=PROMISED_S)
                processor._effort.automaton.grow(taken / len(together))
                processor._take(mask)
        if alone:
            masks, times = alone[0]._vocabulary.timed_masks([processor._matcher for processor in alone])
            for processor, mask, seconds in zip(alone, masks, times, strict=True):
                processor._is_slow = seconds > PROMISED_S
                processor._effort.add(seconds, promised_s=PROMISED_S)
                processor._take(mask)

    def _take(self, mask: Bitmasks) -> None:
        if self._matcher.is_error():
            self._effort.automaton.is_broken = True
        self._failure = self.failure
        if self._failure is not None:
            mask[:] = 0
        elif self._withheld is not None and self._withheld.is_active:
            without = mask.copy()
            ends = self._withheld.ends[self._withheld.ends < self._vocabulary.size]
            np.bitwise_and.at(without, ends >> 5, ~(np.int32(1) << (ends & 31).astype(np.int32)))
            mask = without if without.any() else mask
        self._mask = mask

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        cls.prepare(processors)
        masks = [processor._mask for processor in processors if processor._mask is not None]
        _mask_on_cpu(logits, rows, masks, processors[0]._vocabulary)

    def bits(self, vocabulary: int) -> Bitmasks:
        self.prepare([self])
        assert self._mask is not None
        covered, words = min(self._vocabulary.size, vocabulary), np.zeros(-(-vocabulary // 32), np.int32)
        own = self._mask[: -(-covered // 32)]
        words[: len(own)] = own
        if covered % 32:
            words[len(own) - 1] &= np.int32((1 << covered % 32) - 1)
        return words

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a token of the output.

        Raises:
            RequestFailedError: the grammar has become too complex to be followed.
        """
        self._mask = None
        if self._withheld is not None:
            self._withheld.accept(token_id)
        if self._num_ends or token_id in self._vocabulary.end_token_ids:
            self._num_ends += 1
            return
        started = time.thread_time()
        accepted = self._matcher.consume_token(token_id)
        self._effort.add(time.thread_time() - started)
        if not accepted:
            self._effort.automaton.is_broken = True
            raise RequestFailedError(self.failure or "the grammar refuses its token", code="grammar_failed")

    def roll_back(self, count: int) -> None:
        self._mask = None
        if self._withheld is not None:
            self._withheld.roll_back(count)
        unfed = min(count, self._num_ends)
        self._num_ends -= unfed
        # A matcher in error can't be rolled back: the request will fail.
        if count > unfed and not self._matcher.is_error():
            done = self._matcher.rollback(count - unfed)
            assert done, self._matcher.get_error()

    def fork(self) -> Self:
        withheld = self._withheld.fork() if self._withheld is not None else None
        other = type(self)(self._matcher.deep_copy(), self._vocabulary, withheld, self._effort.fork())
        other._num_ends, other._mask, other._failure = self._num_ends, self._mask, self._failure
        return other


def _mask_on_cpu(
    logits: torch.Tensor, rows: Sequence[int], masks: Sequence[Bitmasks], vocabulary: Vocabulary
) -> None:
    """Mask rows byte by byte, without a branch: 14 us a row, where `masked_fill` takes up to 240."""
    values, most = logits.numpy(), vocabulary.scratch
    covered = min(vocabulary.size, values.shape[1])
    for row, mask in zip(rows, masks, strict=True):
        # A byte is always in range; clipping it skips the check.
        np.take(_CEILINGS, mask.view(np.uint8), axis=0, out=most, mode="clip")
        own = values[row]
        np.minimum(own[:covered], most.reshape(-1)[:covered], out=own[:covered])
        own[covered:] = -np.inf


class Grammar:
    """Compiled grammar: a matcher at its beginning, whose copies share its automaton.

    Args:
        account: charged for work of answers beyond the promised time.
        num_bytes: memory of the compiled grammar.
    """

    def __init__(
        self, prototype: llguidance.LLMatcher, vocabulary: Vocabulary, account: WorkAccount, num_bytes: int
    ) -> None:
        self._prototype = prototype
        self._vocabulary = vocabulary
        self._account = account
        self.automaton = Automaton(num_bytes)

    def start(self, withheld: MinTokens | None = None, effort: Effort | None = None) -> GrammarMask:
        """Return the logits processor of one sample. Takes some microseconds.

        Args:
            effort: counts the work of the answer; None: the tenant's account is charged.
        """
        effort = effort if effort is not None else Effort(self._account, self.automaton)
        return GrammarMask(self._prototype.deep_copy(), self._vocabulary, withheld, effort)

    def after(self, prefix: str) -> Grammar:
        """Return the grammar that goes on after a prefix of the answer. O(prefix).

        Raises:
            InvalidRequestError: no text of the grammar has this prefix; says from where on.
        """
        other = copy.copy(self)
        other._prototype = self._prototype.deep_copy()
        started = time.thread_time()
        _consume(other._prototype, self._vocabulary, prefix)
        self._account.charge(time.thread_time() - started)
        return other


def _consume(matcher: llguidance.LLMatcher, vocabulary: Vocabulary, prefix: str) -> None:
    """Have a matcher at its beginning accept a text.

    Raises:
        InvalidRequestError: the grammar does not allow the text.
    """
    tokens = vocabulary.encode(prefix)
    count = int(matcher.try_consume_tokens(tokens))
    if count < len(tokens):
        fits = len(vocabulary.decode(tokens[:count]))
        raise InvalidRequestError(
            f"the text that the answer goes on from contradicts its grammar at {prefix[fits : fits + 40]!r} "
            f"(character {fits}); change the text, or leave the grammar out",
            param="structured",
        )
