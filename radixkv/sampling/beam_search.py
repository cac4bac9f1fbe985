"""Beam search as a loop over `generate`: each step asks for one more token of every running beam.

The life of a search:

 1. The prompt is generated from once: one token, with the logprobs of the likeliest ones.
 2. `BeamSearch.advance` decides, purely, which beams go on: no models or blocks in here.
 3. Each beam that goes on is a request of its own: prompt and tokens so far. All of them but the last token
    is cached, so that a step computes one token a beam. Beams that share a beginning share its blocks.
 4. Repeat 2 and 3 until no running beam can get better than the finished ones.

The rules are those of transformers' `generate(num_beams=...)`, so that scores and sequences can be compared:

    candidates   the max(2, 1 + number of end tokens) * width best continuations over all beams
    finished     candidates among the best `width` that end (end token, or the length limit); their score is
                 the sum of logprobs / length ** length_penalty; the best `width` finished ones are kept
    running      the best `width` candidates that do not end
    stop         when no running beam can beat the worst finished one (see `early_stopping`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.errors import ENDS_PROCESS, InvalidRequestError
from radixkv.request import MAX_LOGPROBS, CompletionOutput, RequestOutput, SamplingParams

MAX_BEAM_WIDTH = 64

TokenArray: TypeAlias = npt.NDArray[np.int32]


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

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        """One step of the search: afterwards `running` has the beams that run next, best first.

        Args:
            candidates: per running beam, its likeliest next tokens with their logprobs, likeliest first.
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
        beams: list[Beam] = []
        for place, (logprob, i, token) in enumerate(pool):
            ends = token in self.end_token_ids
            if ends or at_limit:
                if place < width:
                    self._finish((*self.running[i].tokens, token), logprob, "stop" if ends else "length")
            elif len(beams) < width:
                beams.append(Beam((*self.running[i].tokens, token), logprob))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[width:]
        self.running = beams
        self.is_done = not beams or self._cannot_improve(length)

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


class Generate(Protocol):
    """Complete prompts of token ids, all at once; one output per prompt, in order."""

    def __call__(self, prompts: list[TokenArray], params: SamplingParams) -> list[RequestOutput]: ...


class _RunningSearch:
    """One prompt's search between two steps."""

    def __init__(self, prompt: TokenArray, search: BeamSearch) -> None:
        self.prompt = prompt
        self.search = search
        self.first: RequestOutput | None = None
        self.failed: RequestOutput | None = None
        self.num_preemptions = self.num_generated = 0
        self.elapsed_s = 0.0  # one token after the other

    @property
    def is_done(self) -> bool:
        return self.search.is_done or self.failed is not None

    def next_prompts(self) -> list[TokenArray]:
        """What to generate one token from: a prompt for each running beam."""
        return [
            np.concatenate([self.prompt, np.asarray(beam.tokens, dtype=np.int32)])
            for beam in self.search.running
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """A token for each running beam, with what else was likely there."""
        self.first = self.first or outputs[0]
        self.num_preemptions += sum(output.num_preemptions for output in outputs)
        self.num_generated += sum(output.num_generated_tokens for output in outputs)
        self.failed = next((output for output in outputs if output.error is not None), None)
        if self.failed is None:
            self.search.advance([_candidates(output) for output in outputs])
        self.elapsed_s += max((o.times.finished or 0.0 for o in outputs if o.times is not None), default=0.0)

    def output(self, decode: Callable[[list[int]], str] | None) -> RequestOutput:
        """The outcome, best beam first."""
        assert self.first is not None
        result = replace(self.first, outputs=[], num_preemptions=self.num_preemptions)
        result.num_generated_tokens = self.num_generated
        if self.first.times is not None:
            result.times = replace(self.first.times, finished=self.elapsed_s)
        result.prompt_token_ids = self.prompt.tolist()
        if self.failed is not None:
            result.error, result.error_code = self.failed.error, self.failed.error_code
            result.outputs = [CompletionOutput(0, finish_reason=self.failed.outputs[0].finish_reason)]
            return result
        for index, hypothesis in enumerate(self.search.results()):
            shown = list(hypothesis.tokens)
            if hypothesis.finish_reason == "stop":
                shown.pop()
            completion = CompletionOutput(
                index=index,
                token_ids=list(hypothesis.tokens),
                cumulative_logprob=hypothesis.logprob,
                finish_reason=hypothesis.finish_reason,
                score=hypothesis.score,
            )
            try:
                completion.text = decode(shown) if decode is not None else ""
            except ENDS_PROCESS:
                raise
            except BaseException as error:
                result.error = f"decoding the output failed: {error}"
                result.error_code = "detokenization_failed"
                completion.finish_reason = "error"
            result.outputs.append(completion)
        return result


def _candidates(output: RequestOutput) -> list[tuple[int, float]]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [(entry.token_id, entry.logprob) for entry in logprobs[0].top]


def search_beams(
    prompts: Sequence[TokenArray],
    params: BeamSearchParams,
    *,
    generate: Generate,
    end_token_ids: Collection[int],
    room_after: Callable[[TokenArray], int],
    decode: Callable[[list[int]], str] | None,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> list[RequestOutput]:
    """Search the best continuations of each prompt; all searches take their steps together.

    Args:
        prompts: token ids of each, int32.
        generate: completes prompts; what it raises for a bad prompt goes through.
        end_token_ids: tokens that end a beam.
        room_after: how many tokens can follow a prompt.
        decode: token ids to text; None: outputs have no text.
        on_progress: called after each step with the number of searches that are done.

    Returns:
        One output per prompt, its completions best first. A search of which a step failed has `error` set;
        the others are unharmed.
    """
    searches = []
    for prompt in prompts:
        most = min(params.max_tokens, room_after(prompt))
        search = BeamSearch(params, end_token_ids=end_token_ids, max_new_tokens=most)
        searches.append(_RunningSearch(prompt, search))
    going = searches
    while going:
        step = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=min(going[0].search.num_candidates, MAX_LOGPROBS),
        )
        asked = [search.next_prompts() for search in going]
        outputs = iter(generate([prompt for several in asked for prompt in several], step))
        for running, several in zip(going, asked, strict=True):
            running.take([next(outputs) for _ in several])
        going = [search for search in going if not search.is_done]
        on_progress(len(searches) - len(going))
    return [search.output(decode) for search in searches]
