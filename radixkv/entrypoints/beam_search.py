# SPDX-License-Identifier: Apache-2.0
"""Beam search as a loop over `generate`: each step asks for one more token of every running beam.

The life of a search:

 1. The prompt is generated from once: one token, with the logprobs of the likeliest ones.
 2. `BeamSearch.advance` decides, purely, which beams go on: no models or blocks in here.
 3. Each beam that goes on is a request of its own: prompt and tokens so far. All of them but the last token
    is cached, so that a step computes one token a beam. Beams that share a beginning share its blocks.
 4. Repeat 2 and 3 until no running beam can get better than the finished ones.

The rules are transformers' own (`generate(num_beams=...)`), so that scores and sequences can be compared:

    candidates   the max(2, 1 + number of end tokens) * width best continuations over all beams
    finished     candidates among the best `width` that end (end token, or the length limit); their score is
                 the sum of logprobs / length ** length_penalty; the best `width` finished ones are kept
    running      the best `width` candidates that do not end
    stop         when no running beam can beat the worst finished one (see `early_stopping`)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.engine.outputs import CompletionOutput, RequestOutput
from radixkv.errors import ENDS_PROCESS, InvalidRequestError
from radixkv.option_names import BEAM_NAMES, check_names
from radixkv.sampling.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = 64

TokenArray: TypeAlias = npt.NDArray[np.int32]


@check_names(BEAM_NAMES)
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search.

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
    """Generated tokens with the sum of their logprobs; once it is finished, its score and why it ended."""

    tokens: tuple[int, ...]
    logprob: float
    score: float = 0.0
    finish_reason: Literal["stop", "length"] | None = None


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
        self.finished: list[Beam] = []
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Candidates looked at per step, and enough to ask of each beam."""
        return max(2, 1 + len(self.end_token_ids)) * self.params.beam_width

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Take one step of the search: afterwards `running` has the next beams, best first.

        Args:
            candidates: per running beam, its likeliest next tokens with their logprobs, likeliest first.
        """
        assert not self.is_done
        width = self.params.beam_width
        pool = [
            (beam.logprob + logprob, i, token)
            for i, (beam, likeliest) in enumerate(zip(self.running, candidates, strict=True))
            for token, logprob in likeliest
        ]
        pool.sort(key=lambda item: (-item[0], item[1]))
        length = len(self.running[0].tokens) + 1
        at_limit = length >= self.max_new_tokens
        beams: list[Beam] = []
        for rank, (logprob, i, token) in enumerate(pool[: self.num_candidates]):
            beam = Beam((*self.running[i].tokens, token), logprob)
            ends = token in self.end_token_ids
            if ends or at_limit:
                if rank < width and not (self._has_enough and self.params.early_stopping is True):
                    self.finished.append(self._finished(beam, "stop" if ends else "length"))
            elif len(beams) < width:
                beams.append(beam)
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[width:]
        self.running = beams
        self.is_done = not beams or self._cannot_improve(length)

    @property
    def _has_enough(self) -> bool:
        return len(self.finished) >= self.params.beam_width

    def _finished(self, beam: Beam, reason: Literal["stop", "length"]) -> Beam:
        score = beam.logprob / max(1, len(beam.tokens)) ** self.params.length_penalty
        return replace(beam, score=score, finish_reason=reason)

    def _cannot_improve(self, length: int) -> bool:
        if not self._has_enough:
            return False
        if self.params.early_stopping is True:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best_length = self.max_new_tokens if longest else length
        best = self.running[0].logprob / best_length**self.params.length_penalty
        return best <= self.finished[-1].score

    def results(self) -> list[Beam]:
        """The best `n` outputs, best first; running beams stand in where too few have finished."""
        unfinished = [self._finished(beam, "length") for beam in self.running]
        return [*self.finished, *unfinished][: self.params.n or self.params.beam_width]


def search_beams(
    prompts: Sequence[TokenArray],
    params: BeamSearchParams,
    *,
    generate: Callable[[Sequence[tuple[int, TokenArray]], SamplingParams], list[RequestOutput]],
    end_token_ids: Collection[int],
    room_after: Callable[[TokenArray], int],
    decode: Callable[[list[int]], str] | None,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> list[RequestOutput]:
    """Search the best continuations of each prompt; all searches take their steps together.

    Args:
        prompts: token ids of each, int32.
        generate: completes beams, each the index of its prompt and the tokens behind that; one output each,
            in order. Its errors for a bad prompt go through.
        end_token_ids: tokens that end a beam.
        room_after: how many tokens can follow a prompt.
        decode: token ids to text; None: outputs have no text.
        on_progress: called after each step with the number of searches that are done.

    Returns:
        One output per prompt, its completions best first. A search with a failed step has `error` set;
        the others are unharmed.
    """
    searches = [
        BeamSearch(
            params,
            end_token_ids=end_token_ids,
            max_new_tokens=min(params.max_tokens, room_after(prompt)),
        )
        for prompt in prompts
    ]
    found: dict[int, RequestOutput] = {}
    going = list(range(len(searches)))
    while going:
        num_top = min(searches[going[0]].num_candidates, MAX_LOGPROBS)
        step = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=num_top)
        asked = [(i, np.asarray(beam.tokens, dtype=np.int32)) for i in going for beam in searches[i].running]
        outputs = iter(generate(asked, step))
        for i in going:
            own = list(itertools.islice(outputs, len(searches[i].running)))
            if i not in found:
                times = own[0].times and replace(own[0].times, finished=0.0)
                found[i] = replace(own[0], outputs=[], num_preemptions=0, num_generated_tokens=0, times=times)
            _take(searches[i], found[i], own)
        going = [i for i in going if not searches[i].is_done]
        on_progress(len(searches) - len(going))
    for i, search in enumerate(searches):
        found[i].prompt_token_ids = prompts[i].tolist()
        if found[i].error is None:
            _finish(found[i], search.results(), decode)
    return [found[i] for i in range(len(searches))]


def _take(search: BeamSearch, found: RequestOutput, outputs: Sequence[RequestOutput]) -> None:
    """Extend each running beam by a token, or end where one of them has failed; count the tokens."""
    found.num_preemptions += sum(output.num_preemptions for output in outputs)
    found.num_generated_tokens += sum(output.num_generated_tokens for output in outputs)
    took_s = max(
        (output.times.finished or 0.0 for output in outputs if output.times is not None), default=0.0
    )
    if found.times is not None:  # one token after the other
        found.times = replace(found.times, finished=(found.times.finished or 0.0) + took_s)
    failed = next((output for output in outputs if output.error is not None), None)
    if failed is not None:
        search.is_done = True
        found.error, found.error_code = failed.error, failed.error_code
        found.outputs = [CompletionOutput(0, finish_reason=failed.outputs[0].finish_reason)]
        return
    candidates = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        candidates.append([(entry.token_id, entry.logprob) for entry in logprobs[0].top])
    search.advance(candidates)


def _finish(found: RequestOutput, beams: Sequence[Beam], decode: Callable[[list[int]], str] | None) -> None:
    """Give an output its completions, best beam first."""
    for index, beam in enumerate(beams):
        completion = CompletionOutput(
            index=index,
            token_ids=list(beam.tokens),
            cumulative_logprob=beam.logprob,
            finish_reason=beam.finish_reason,
            score=beam.score,
        )
        shown = beam.tokens[:-1] if beam.finish_reason == "stop" else beam.tokens
        try:
            completion.text = decode(list(shown)) if decode is not None else ""
        except ENDS_PROCESS:
            raise
        except BaseException as error:
            found.error, found.error_code = f"decoding the output failed: {error}", "detokenization_failed"
            completion.finish_reason = "error"
        found.outputs.append(completion)
