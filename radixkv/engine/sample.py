# SPDX-License-Identifier: Apache-2.0
"""Sample: one answer to a request, as the engine has it: its tokens, text and end, its random stream.

Text is held back in two cases only: while it ends in half a character (the decoder waits for the rest), and
while its end could be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from radixkv.sampling.logprobs import Logprob, TokenLogprobs
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState
from radixkv.scheduling.request import FinishReason
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.text.text_tokenizer import TextDecoder


class TextSource(Protocol):
    """Part of the tokenizer's interface that this module needs."""

    def stream(self, skip_special_tokens: bool = True, *, kept: Collection[str] = ()) -> TextDecoder: ...

    def token_text(self, token_id: int) -> str: ...


def find_stop(text: str, stops: tuple[str, ...], start: int) -> tuple[int, str] | None:
    """The earliest stop string in text[start:], as (position, stop string); the longest one on ties.

    >>> find_stop("one two", ("wo", "tw"), 0)
    (4, 'tw')
    """
    found: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop, start)
        if at < 0:
            continue
        if found is None or at < found[0] or (at == found[0] and len(stop) > len(found[1])):
            found = (at, stop)
    return found


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Count the characters at the end of a text that could begin a stop string.

    >>> held_back("and so", ("stop",)), held_back("and s", ("stop",))
    (0, 1)
    """
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


@dataclass(slots=True)
class SampleOutput:
    """The output side of one sample: give it tokens, it makes text of them and says when to stop.

    Args:
        end_token_ids: the model's own end tokens (empty with `ignore_eos`).
        max_output_tokens: most tokens this sample may have.

    Attributes:
        text: text that was not taken yet, without a found stop string: all of it, if it is never taken.
        logprobs: likewise.
    """

    params: SamplingParams
    tokenizer: TextSource | None
    end_token_ids: frozenset[int]
    max_output_tokens: int
    text: str = ""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _decoder: TextDecoder | None = None
    _search_from: int = 0

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self._decoder = self.tokenizer.stream(
                self.params.skip_special_tokens, kept=self.params.kept_special_tokens
            )

    def push(self, token_id: int, *, is_complete: bool = False) -> None:
        """Take one more token; sets `finish_reason` when it is the last.

        Args:
            is_complete: the output's grammar says that it ends here.
        """
        assert self.finish_reason is None
        params = self.params
        self.num_tokens += 1
        may_stop = is_complete or self.num_tokens >= params.min_tokens
        if may_stop and token_id in self.end_token_ids and token_id not in params.stop_token_ids:
            self.finish_reason = "stop"
        elif may_stop and token_id in params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        if self._decoder is not None and (self.finish_reason is None or params.include_stop_str_in_output):
            self.text += self._decoder.push([token_id])
        if self.finish_reason is None and is_complete:
            self.finish_reason = "stop"
        if self.finish_reason is None and self.num_tokens >= self.max_output_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._decoder is not None:
            self.text += self._decoder.finish()
        stops = params.stop_strings
        if stops:
            if may_stop:
                self._look_for_stop(stops)
            else:
                self._search_from = len(self.text)

    def _look_for_stop(self, stops: tuple[str, ...]) -> None:
        found = find_stop(self.text, stops, self._search_from)
        if found is not None:
            at, stop = found
            self.text = self.text[: at + len(stop) if self.params.include_stop_str_in_output else at]
            self.finish_reason, self.stop_reason = "stop", stop
        else:
            # A stop string may have begun in the searched part.
            longest = max(len(stop) for stop in stops)
            self._search_from = max(self._search_from, len(self.text) - longest + 1)

    def take(self) -> tuple[str, list[TokenLogprobs]]:
        """The text to deliver now, and the logprobs of the tokens since the last call."""
        size = len(self.text)
        if self.finish_reason is None:
            size -= held_back(self.text, self.params.stop_strings)
        text, self.text = self.text[:size], self.text[size:]
        self._search_from = max(0, self._search_from - size)
        logprobs, self.logprobs = self.logprobs, []
        return text, logprobs

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the sample from outside, with the text that it has."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self._decoder is not None:
                self.text += self._decoder.finish()

    def record_logprobs(self, entry: TokenLogprobs) -> None:
        self.logprobs.append(entry)
        self.cumulative_logprob += entry.chosen.logprob


def name_logprobs(
    chosen: tuple[int, float, int], top: list[tuple[int, float]], text_of: Callable[[int], str]
) -> TokenLogprobs:
    """Turn raw logprobs into a record that carries each token's text."""
    token_id, logprob, rank = chosen
    return TokenLogprobs(
        chosen=Logprob(token_id, logprob, rank, text_of(token_id)),
        top=tuple(Logprob(t, value, i + 1, text_of(t)) for i, (t, value) in enumerate(top)),
    )


@dataclass(slots=True, eq=False, repr=False)
class Sample(SequenceState):
    """A sequence with its text and stop conditions, its random stream, and counts of its guesses.

    Its maker sets the first two.

    Attributes:
        accepted_draft_tokens: its right guesses; in a stream, since its last delta.
        rejected_draft_tokens: guesses that were wrong, likewise.
    """

    output: SampleOutput = field(init=False)
    sampling_state: SamplingState = field(init=False)
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0


def sample_of(request: SequenceState) -> Sample:
    """Narrow the scheduler's requests: all of them are samples."""
    assert isinstance(request, Sample)
    return request
