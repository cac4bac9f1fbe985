# SPDX-License-Identifier: Apache-2.0
"""Changes of logits before a token is chosen: bias, penalties, tokens to avoid.

A processor belongs to one request and remembers its tokens as far as it needs them. It is applied to
the rows of many requests at once: each kind touches only the places it changes, in a few operations for all
of its rows. Rows of requests without processors are not looked at.

A new kind is a subclass with a place in the order of application, its `stage`, and a line in
`make_processors`. One whose work on the host needs no logits does it in `prepare`, while a GPU still computes
them.
"""

from __future__ import annotations

import copy
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import torch

from radixkv.sampling.device_arrays import to_device
from radixkv.sampling.device_counts import DeviceCounts
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.token_counts import TokenCounts, TokenIds

#: More tokens than any output has.
NEVER = sys.maxsize


class LogitsProcessor(ABC):
    """Changes one request's logits.

    Attributes:
        stage: kinds are applied in the order of their stages (as in transformers' logits processors).
        prepares: whether the kind has something to do in `prepare`.
    """

    stage: ClassVar[int]
    prepares: ClassVar[bool] = False

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """True if `apply` would change anything now."""

    @property
    def waits_in(self) -> int:
        """Tokens after which no step may run ahead of the next one, as the logits after it depend on it.

        0: the next token is such a one.
        """
        return 0

    @property
    def is_complete(self) -> bool:
        """True if the output ends with the last accepted token, whatever that token is."""
        return False

    @property
    def failure(self) -> str | None:
        """Reason why the request can't go on; None: it can. Known after `apply` at the latest."""
        return None

    def forced_tokens(self) -> list[int]:
        """Return the next tokens, where nothing else can come; none for most kinds."""
        return []

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of some tokens could be accepted, one after the other. Changes nothing."""
        return len(token_ids)

    @classmethod
    def prepare(cls, processors: Sequence[Self]) -> None:
        """Do what `apply` needs done on the host, for all active processors of a step; may be left out."""
        return

    @classmethod
    @abstractmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        """Change rows of float32 logits [R, V] in place: `rows[i]` as `processors[i]` wants, all active.

        A row occurs once. Token ids outside the vocabulary are ignored.
        """

    def accept(self, token_id: int) -> None:  # noqa: B027
        """Take note of a token that the request has got. O(1)."""

    def roll_back(self, count: int) -> None:  # noqa: B027
        """Forget the last `count` tokens. O(count)."""

    def fork(self) -> Self:
        """Return a processor with the same past and a future of its own."""
        return copy.copy(self)


class LogitBias(LogitsProcessor):
    """Adds a number to the logit of each of some tokens."""

    stage = 0

    def __init__(self, bias: Iterable[tuple[int, float]]) -> None:
        pairs = list(bias)
        self.tokens = np.array([token for token, _ in pairs], dtype=np.int64)
        self.bias = np.array([value for _, value in pairs], dtype=np.float32)

    @property
    def is_active(self) -> bool:
        return len(self.tokens) > 0

    @property
    def waits_in(self) -> int:
        return NEVER

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        at, (bias,) = _places(logits, rows, [p.tokens for p in processors], [p.bias for p in processors])
        logits[at] = logits[at] + bias


class Counting(LogitsProcessor):
    """Base of the kinds that depend on how often tokens occurred, and change the logits of these tokens."""

    def __init__(self, counts: TokenCounts) -> None:
        self.counts = counts

    @property
    def is_active(self) -> bool:
        return bool(self.counts)

    @property
    def waits_in(self) -> int:
        return NEVER  # it is counted on the device, by `apply_counted`

    @classmethod
    @abstractmethod
    def apply_counted(
        cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self], memory: DeviceCounts
    ) -> None:
        """Do what `apply` does by counts on the device, which are up to date, and give the same logits."""

    def accept(self, token_id: int) -> None:
        self.counts.add(token_id)

    def roll_back(self, count: int) -> None:
        self.counts.remove(count)

    def fork(self) -> Self:
        other = copy.copy(self)
        other.counts = self.counts.copy()
        return other


def _with_counts(
    logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Counting], memory: DeviceCounts
) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
    """Yield logits [N, V] of rows, to be changed in place, their counts, and which of `rows` they are."""
    are_all = len(rows) == len(logits)  # in order
    where = to_device(rows, logits.device)
    for start, counts in memory.rows([p.counts for p in processors], logits):
        part = slice(start, start + len(counts))
        values = logits[part] if are_all else logits.index_select(0, where[part])
        yield values, counts, part
        if not are_all:
            logits.index_copy_(0, where[part], values)


class RepetitionPenalty(Counting):
    """Divides the logits of tokens that were seen, in prompt or output; multiplies negative ones (CTRL)."""

    stage = 1

    def __init__(self, penalty: float, prompt_token_ids: TokenIds) -> None:
        super().__init__(TokenCounts.of(prompt_token_ids))
        self.penalty = penalty

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        tokens = [p.counts.tokens for p in processors]
        at, (penalties,) = _places(logits, rows, tokens, [p.penalty for p in processors])
        values = logits[at]
        logits[at] = torch.where(values > 0, values / penalties, values * penalties)

    @classmethod
    def apply_counted(
        cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self], memory: DeviceCounts
    ) -> None:
        penalties = to_device(np.array([p.penalty for p in processors], np.float32)[:, None], logits.device)
        for values, counts, part in _with_counts(logits, rows, processors, memory):
            changed = torch.where(values > 0, values / penalties[part], values * penalties[part])
            values.copy_(torch.where(counts > 0, changed, values))


class CountPenalty(Counting):
    """Lowers the logits of generated tokens: once for each, and for each time it was generated (OpenAI)."""

    stage = 2

    def __init__(self, presence: float, frequency: float) -> None:
        super().__init__(TokenCounts())
        self.presence, self.frequency = presence, frequency

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        at, (counts, frequency, presence) = _places(
            logits,
            rows,
            [p.counts.tokens for p in processors],
            [p.counts.counts for p in processors],
            [p.frequency for p in processors],
            [p.presence for p in processors],
        )
        logits[at] = logits[at] - frequency * counts - presence

    @classmethod
    def apply_counted(
        cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self], memory: DeviceCounts
    ) -> None:
        numbers = np.array([[p.frequency for p in processors], [p.presence for p in processors]], np.float32)
        frequency, presence = to_device(numbers[..., None], logits.device)
        for values, counts, part in _with_counts(logits, rows, processors, memory):
            changed = values - frequency[part] * counts - presence[part]
            values.copy_(torch.where(counts > 0, changed, values))


class MinTokens(LogitsProcessor):
    """Rules the tokens out that would end an output before it has its least number of tokens."""

    stage = 3

    def __init__(self, least: int, end_token_ids: Collection[int]) -> None:
        self.least = least
        self.ends = np.array(sorted({token for token in end_token_ids if 0 <= token < 2**31}), dtype=np.int64)
        self.num_generated = 0

    @property
    def is_active(self) -> bool:
        return self.num_generated < self.least and len(self.ends) > 0

    @property
    def waits_in(self) -> int:
        return self.least - 1 - self.num_generated if self.num_generated < self.least else NEVER

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        at, _ = _places(logits, rows, [p.ends for p in processors])
        logits[at] = -torch.inf

    def accept(self, token_id: int) -> None:
        self.num_generated += 1

    def roll_back(self, count: int) -> None:
        self.num_generated -= count


class TokenMask(LogitsProcessor):
    """Base of the kinds that only say which tokens may come next."""

    @abstractmethod
    def bits(self, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the allowed ones of so many tokens, not to be written to.

        Returns:
            int32 [ceil(vocabulary / 32)]: bit i % 32 of word i // 32 says whether token i is allowed.
        """


class AllowedTokens(TokenMask):
    """Rules out every token but some."""

    stage = 5

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.allowed = frozenset(token_ids)
        # Made once, for all samples of a request.
        self._bits = np.empty(0, np.int32)
        self._most: torch.Tensor | None = None

    @property
    def is_active(self) -> bool:
        return True

    @property
    def waits_in(self) -> int:
        return NEVER

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return next((i for i, token in enumerate(token_ids) if token not in self.allowed), len(token_ids))

    def bits(self, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        size = -(-vocabulary // 32)
        if len(self._bits) != size:
            own = np.array([token for token in self.allowed if token < vocabulary], np.int64)
            words = np.zeros(size, np.uint32)
            np.bitwise_or.at(words, own >> 5, np.uint32(1) << (own & 31).astype(np.uint32))
            self._bits = words.view(np.int32)
        return self._bits

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        for row, processor in zip(rows, processors, strict=True):
            own = logits[row]
            torch.minimum(own, processor._bounds(len(own)), out=own)

    def _bounds(self, vocabulary: int) -> torch.Tensor:
        """Return the most that each logit of a row may be [V]; made once, for all samples of a request."""
        if self._most is None or len(self._most) != vocabulary:
            bits = np.unpackbits(self.bits(vocabulary).view(np.uint8), count=vocabulary, bitorder="little")
            self._most = torch.from_numpy(np.where(bits, np.float32(np.inf), np.float32(-np.inf)))
        return self._most


class BadWords(LogitsProcessor):
    """Rules out the last token of some sequences, where the tokens before it have just been generated.

    The cost of a step grows with the different lengths, each counted once, not with the number of sequences.
    """

    stage = 6

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        ends: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            ends.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self.ends = {prefix: np.array(sorted(last), dtype=np.int64) for prefix, last in ends.items()}
        self.lengths = sorted({len(prefix) for prefix in ends})
        self.generated: list[int] = []

    @property
    def is_active(self) -> bool:
        return len(self._ruled_out()) > 0

    @property
    def waits_in(self) -> int:
        return 0 if self.lengths[-1] else NEVER

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        count = 0
        for token in token_ids:
            if token in self._ruled_out():
                break
            self.accept(token)
            count += 1
        self.roll_back(count)
        return count

    def _ruled_out(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the tokens that would complete a sequence now, each once."""
        size = len(self.generated)
        found = [
            self.ends[prefix]
            for length in self.lengths
            if length <= size and (prefix := tuple(self.generated[size - length :])) in self.ends
        ]
        if len(found) == 1:
            return found[0]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    @classmethod
    def apply(cls, logits: torch.Tensor, rows: Sequence[int], processors: Sequence[Self]) -> None:
        at, _ = _places(logits, rows, [p._ruled_out() for p in processors])
        logits[at] = -torch.inf

    def accept(self, token_id: int) -> None:
        self.generated.append(token_id)

    def roll_back(self, count: int) -> None:
        del self.generated[len(self.generated) - count :]

    def fork(self) -> Self:
        other = copy.copy(self)
        other.generated = list(self.generated)
        return other


class GrammarState(Protocol):
    """A compiled grammar."""

    def start(self, withheld: MinTokens | None = None) -> LogitsProcessor:
        """Make the processor of one sample; it applies `withheld` itself."""


def make_processors(
    params: SamplingParams,
    prompt_token_ids: TokenIds,
    end_token_ids: Collection[int],
    grammar: GrammarState | None = None,
) -> list[LogitsProcessor]:
    """Return the processors that a request needs, in no particular order; most requests need none.

    `params.bad_words` are token ids, not texts.
    """
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias.items()))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(params.repetition_penalty, prompt_token_ids))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(CountPenalty(params.presence_penalty, params.frequency_penalty))
    if params.allowed_token_ids is not None:
        processors.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        assert not any(isinstance(word, str) for word in params.bad_words), "their tokens are wanted"
        processors.append(BadWords(cast("Sequence[Sequence[int]]", params.bad_words)))
    min_tokens = MinTokens(params.min_tokens, end_token_ids) if params.min_tokens else None
    if grammar is not None:
        processors.append(grammar.start(min_tokens))
    elif min_tokens is not None:
        processors.append(min_tokens)
    return processors


def prepare_processors(processors: Sequence[Sequence[LogitsProcessor]]) -> None:
    """Let the active processors of a step's rows do what needs no logits, each kind at once."""
    preparing = [[each for each in own if each.prepares] for own in processors if own]
    for kind, (_, members) in by_kind(preparing).items():
        kind.prepare(members)


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Tokens that a running step chooses, for steps that are launched before they are known.

    Attributes:
        chosen: its tokens, empty until they are known.
        places: the place there of the token of each of some rows; -1: the host knows all tokens of a row.
        tokens: int64 on the device, the tokens of the rows with a place, in order.
    """

    chosen: list[int]
    places: Sequence[int]
    tokens: torch.Tensor

    def tokens_of(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the tokens of some rows with a place, in ascending order; int64 on the device."""
        if len(rows) == len(self.tokens):
            return self.tokens
        order = list(itertools.accumulate((place >= 0 for place in self.places), initial=0))
        return self.tokens.index_select(0, to_device([order[row] for row in rows], self.tokens.device))


#: For each kind of processor the rows, in order, with an active one, and these processors.
ByKind = Mapping[type[Any], tuple[Sequence[int], Sequence[Any]]]


def apply_processors(
    logits: torch.Tensor, kinds: ByKind, memory: DeviceCounts | None = None, fed: FedTokens | None = None
) -> None:
    """Change rows of float32 logits [R, V] in place as their processors want.

    Args:
        kinds: see `by_kind`.
        memory: counts of tokens on the device; None: their places are sent.
        fed: tokens that the host does not know yet, of the R rows; None: there are none.
    """
    for kind in sorted(kinds, key=lambda kind: kind.stage):
        rows, members = kinds[kind]
        if memory is None or not issubclass(kind, Counting):
            kind.apply(logits, rows, members)
            continue
        counts = [member.counts for member in members]
        memory.update(counts, logits)
        if fed is not None:
            late = [row for row in rows if fed.places[row] >= 0]
            if len(late) < len(rows):
                counts = [own for own, row in zip(counts, rows, strict=True) if fed.places[row] >= 0]
            if late:
                memory.feed(counts, fed.chosen, [fed.places[row] for row in late], fed.tokens_of(late))
        kind.apply_counted(logits, rows, members, memory)


def by_kind(
    processors: Sequence[Sequence[LogitsProcessor]], places: Sequence[int] = ()
) -> dict[type[Any], tuple[list[int], list[Any]]]:
    """Return for each kind the rows with an active processor of it, and these processors.

    Args:
        processors: of each row.
        places: of each row, see `FedTokens`: a token to come makes kinds that count active; empty: none is.
    """
    kinds: dict[type[Any], tuple[list[int], list[Any]]] = {}
    for row, own in enumerate(processors):
        is_fed = bool(places) and places[row] >= 0
        for processor in own:
            if processor.is_active or (is_fed and isinstance(processor, Counting)):
                found = kinds.get(type(processor))
                if found is None:
                    found = kinds[type(processor)] = [], []
                found[0].append(row)
                found[1].append(processor)
    return kinds


def _places(
    logits: torch.Tensor,
    rows: Sequence[int],
    tokens: Sequence[np.ndarray[Any, Any]],
    *values: Sequence[Any],
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Return the places of several rows as one index into the logits, with the values that belong to them.

    Args:
        tokens: for each row the token ids, no id twice.
        values: each has for every row one number, or one per token id.

    Returns:
        (rows, tokens) as int64 tensors, and float32 tensors of the same length.
    """
    sizes = [len(own) for own in tokens]
    row = np.repeat(np.asarray(rows, dtype=np.int64), sizes)
    token = np.concatenate(tokens)
    flat = [
        np.concatenate(own)
        if isinstance(own[0], np.ndarray)
        else np.repeat(np.asarray(own, np.float32), sizes)
        for own in values
    ]
    # Ids are compared on the host: an index out of range would end a GPU's process.
    inside = (token >= 0) & (token < logits.shape[1])
    if not inside.all():
        row, token, flat = row[inside], token[inside], [own[inside] for own in flat]
    to = logits.device
    return (to_device(row, to), to_device(token, to)), [to_device(own, to) for own in flat]
