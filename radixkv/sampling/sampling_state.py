# SPDX-License-Identifier: Apache-2.0
"""Sampling state of one request: its random stream, and its logits processors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

import numpy as np

from radixkv.sampling.logits_processors import NEVER, GrammarState, LogitsProcessor, make_processors
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.token_counts import TokenIds

# The first is asked of every row in every step: half the time of a generator's.
_is_complete, _waits_in = attrgetter("is_complete"), attrgetter("waits_in")

#: Philox makes this many numbers at a time.
_NUMBERS_PER_BLOCK = 4


class RandomStream:
    """Uniform numbers in [0, 1) for one sample: a Philox stream keyed by the seed, readable at any place."""

    __slots__ = ("_count", "_generator", "_last", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed & (2**64 - 1)
        self._start(0)

    def at(self, index: int) -> float:
        """Return number `index` of the stream. O(1) for the last one and numbers soon after it."""
        if index < self._count - 1:
            self._start(index // _NUMBERS_PER_BLOCK)
        while self._count <= index:
            self._last = float(self._generator.random())
            self._count += 1
        return self._last

    def _start(self, block: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=self._seed).advance(block))
        self._count = block * _NUMBERS_PER_BLOCK
        self._last = 0.0


class SamplingState:
    """The state of one sample; it follows the tokens that the request has got.

    Args:
        seed: of the random stream; any integer.
        prompt_token_ids: for the repetition penalty.
        end_token_ids: tokens that must not be chosen before `min_tokens`; ids outside the model's
            vocabulary are ignored.
        grammar: grammar of the output; None: anything.

    Attributes:
        num_generated: tokens that the request has got.
        processors: what changes its logits; empty for most requests.
    """

    __slots__ = ("_random", "num_generated", "processors")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: TokenIds,
        end_token_ids: Collection[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self._random = RandomStream(seed)
        self.num_generated = 0
        self.processors: Sequence[LogitsProcessor] = make_processors(
            params, prompt_token_ids, end_token_ids, grammar
        )

    @property
    def is_complete(self) -> bool:
        """True if the output ends with the last accepted token: its grammar allows nothing more."""
        return any(map(_is_complete, self.processors))

    @property
    def waits_in(self) -> int:
        """Tokens after which no step may run ahead of the next one; see `LogitsProcessor.waits_in`."""
        return min(map(_waits_in, self.processors), default=NEVER)

    @property
    def failure(self) -> str | None:
        """Reason why no token can be chosen; None: no processor forbids all."""
        return next((p.failure for p in self.processors if p.failure is not None), None)

    def forced_tokens(self) -> list[int]:
        """Return the next tokens, where nothing else can come: drafts that are always accepted."""
        return next((forced for p in self.processors if (forced := p.forced_tokens())), [])

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens of a draft could be accepted; the next one must not be. O(count)."""
        return min((p.num_allowed(token_ids) for p in self.processors), default=len(token_ids))

    def draw(self, ahead: int = 0) -> float:
        """Return the random number for the next token but `ahead`; the same until a token is accepted."""
        return self._random.at(self.num_generated + ahead)

    def accept(self, token_id: int) -> None:
        """Accept a token. Called by the engine: a failed step delivers no token."""
        self.num_generated += 1
        for processor in self.processors:
            processor.accept(token_id)

    def roll_back(self, count: int) -> None:
        """Forget the last `count` tokens, as if they had never been accepted. O(count)."""
        assert 0 <= count <= self.num_generated
        self.num_generated -= count
        for processor in self.processors:
            processor.roll_back(count)

    def fork(self, seed: int) -> SamplingState:
        """Return the state of another sample with the same past, and its own random numbers from here on."""
        other = object.__new__(SamplingState)
        other._random = RandomStream(seed)
        other.num_generated = self.num_generated
        other.processors = [processor.fork() for processor in self.processors]
        return other
