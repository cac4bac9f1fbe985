"""Beam search, decided purely: given each beam's likeliest next tokens, which beams go on.

The engine forks and releases leases by what `advance` returns; nothing in here knows of models or blocks.
The rules are those of transformers' `generate(num_beams=...)`, so that scores and sequences can be compared:

    candidates   the max(2, 1 + number of end tokens) * width best continuations over all beams
    finished     candidates among the best `width` that end (end token, or the length limit); their score is
                 the sum of logprobs / length ** length_penalty; the best `width` finished ones are kept
    running      the best `width` candidates that do not end
    stop         when no running beam can beat the worst finished one (see `early_stopping`)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from radixkv.errors import InvalidRequestError

MAX_BEAM_WIDTH = 64


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search.

    Args:
        beam_width: beams that run at once, 1 to 64.
        max_tokens: most tokens to generate.
        length_penalty: exponent of the length in a score; above 0 favours longer outputs.
        early_stopping: True: stop at `beam_width` finished beams; False: when the best running beam, at its
            present length, can't beat the worst finished one; "never": when it can't at any length.
        ignore_eos: end tokens do not end a beam.
        n: outputs to return, at most `beam_width`; None: all.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    n: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                f"beam_width must be from 1 to {MAX_BEAM_WIDTH}, not {self.beam_width!r}", param="beam_width"
            )
        if self.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens must be at least 1, not {self.max_tokens!r}", param="max_tokens"
            )
        if self.n is not None and not 1 <= self.n <= self.beam_width:
            raise InvalidRequestError(
                f"n must be from 1 to beam_width ({self.beam_width}), not {self.n!r}", param="n"
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f"early_stopping must be true, false or 'never', not {self.early_stopping!r}",
                param="early_stopping",
            )


@dataclass(frozen=True, slots=True)
class Beam:
    """A running beam: its generated tokens, and the sum of their logprobs."""

    tokens: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam; `score` has the length penalty applied."""

    tokens: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """The state of one search.

    Args:
        end_token_ids: tokens that end a beam.
        max_new_tokens: length limit of a beam.
    """

    def __init__(
        self, params: BeamSearchParams, *, end_token_ids: Collection[int], max_new_tokens: int
    ) -> None:
        self.params = params
        self.end_token_ids = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self.max_new_tokens = max_new_tokens
        self.running: list[Beam] = [Beam((), 0.0)]
        self.finished: list[Hypothesis] = []
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Candidates looked at per step, and enough to ask of each beam."""
        return max(2, 1 + len(self.end_token_ids)) * self.params.beam_width

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int]]:
        """One step of the search.

        Args:
            candidates: per running beam, its likeliest next tokens with their logprobs, likeliest first.

        Returns:
            The beams that run next, best first, as (index of the parent beam, its next token); empty when
            the search is done.
        """
        assert not self.is_done
        assert len(candidates) == len(self.running)
        width = self.params.beam_width
        pool = [
            (beam.logprob + logprob, i, token)
            for i, beam in enumerate(self.running)
            for token, logprob in candidates[i]
        ]
        pool.sort(key=lambda item: (-item[0], item[1]))
        pool = pool[: self.num_candidates]
        length = len(self.running[0].tokens) + 1
        at_limit = length >= self.max_new_tokens
        going: list[tuple[int, int]] = []
        beams: list[Beam] = []
        for place, (logprob, i, token) in enumerate(pool):
            ends = token in self.end_token_ids
            if ends or at_limit:
                if place < width:
                    self._finish((*self.running[i].tokens, token), logprob, "stop" if ends else "length")
            elif len(going) < width:
                going.append((i, token))
                beams.append(Beam((*self.running[i].tokens, token), logprob))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[width:]
        self.running = beams
        self.is_done = not beams or self._cannot_improve(length)
        return [] if self.is_done else going

    def _finish(self, tokens: tuple[int, ...], logprob: float, reason: Literal["stop", "length"]) -> None:
        full = len(self.finished) >= self.params.beam_width
        if full and self.params.early_stopping is True:
            return
        score = logprob / len(tokens) ** self.params.length_penalty
        self.finished.append(Hypothesis(tokens, logprob, score, reason))

    def _cannot_improve(self, length: int) -> bool:
        if len(self.finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best_length = self.max_new_tokens if longest else length
        best = self.running[0].logprob / best_length**self.params.length_penalty
        return best <= self.finished[-1].score

    def results(self) -> list[Hypothesis]:
        """The best `n` outputs, best first; running beams stand in where too few have finished."""
        penalty = self.params.length_penalty
        unfinished = [
            Hypothesis(
                beam.tokens, beam.logprob, beam.logprob / max(1, len(beam.tokens)) ** penalty, "length"
            )
            for beam in self.running
        ]
        return [*self.finished, *unfinished][: self.params.n or self.params.beam_width]
