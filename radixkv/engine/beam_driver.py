"""Beam search on the engine: gathers what each beam's step gave, then forks, releases and appends.

A beam is a `Request` like any other: scheduled, preempted and resumed by the same rules. What differs is who
chooses its next token. A beam that has its candidates waits until all beams of its search have theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from radixkv.engine.request_group import RequestGroup
from radixkv.request import CompletionOutput, RequestOutput, SamplingParams
from radixkv.scheduling.request_state import Request

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

Candidates = list[tuple[int, float]]


class BeamDriver:
    """Runs every beam search of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._candidates: dict[int, Candidates] = {}  # id of a beam's request -> what may follow it

    @staticmethod
    def likeliest(logits: torch.Tensor, rows: Sequence[int], requests: Sequence[Request]) -> list[Candidates]:
        """The candidates of each beam from its row of logits [S, V]; NaN rows give an empty list."""
        if not requests:
            return []
        own = logits[list(rows)].float()
        logprobs = torch.log_softmax(own, dim=1)
        wanted = max(request.group.beams.num_candidates for request in requests)
        best = torch.topk(logprobs, min(wanted, logprobs.shape[1]), dim=1)
        broken = torch.isnan(own).any(dim=1).tolist()
        pairs = zip(best.indices.tolist(), best.values.tolist(), broken, strict=True)
        return [[] if bad else list(zip(ids, values, strict=True)) for ids, values, bad in pairs]

    def take(self, requests: Sequence[Request], candidates: Sequence[Candidates]) -> None:
        """Take in a step's candidates, and advance each search whose beams are all there."""
        groups: dict[str, RequestGroup] = {}
        for request, found in zip(requests, candidates, strict=True):
            if request.is_finished:
                continue
            if not found:
                self._engine.fail(
                    request, "the model's logits for a beam are not numbers (NaN)", "nan_logits"
                )
                continue
            self._candidates[id(request)] = found
            request.is_paused = True
            groups[request.request_id] = request.group
        for group in groups.values():
            if all(id(request) in self._candidates for request in group.samples):
                try:
                    self._advance(group)
                except Exception as error:
                    self._engine.condemn(group, f"the beam search failed: {error}")
                    raise

    def forget(self, request: Request) -> None:
        """A beam ended from outside (abort, failure)."""
        self._candidates.pop(id(request), None)

    def _advance(self, group: RequestGroup) -> None:
        assert group.beams is not None
        parents = group.samples
        going = group.beams.advance([self._candidates.pop(id(request)) for request in parents])
        taken: set[int] = set()
        beams: list[Request] = []
        for parent, _ in going:
            # The first child takes over its parent's lease; others fork it, before anything is appended.
            beams.append(self._fork(parents[parent]) if parent in taken else parents[parent])
            taken.add(parent)
        for request, (_, token) in zip(beams, going, strict=True):
            request.tokens.append(token)
            request.is_paused = False
            request.reserved_sequence_slots = 0
        group.samples = beams
        self._engine.count_generated(len(beams))
        for i, request in enumerate(parents):
            if i not in taken:
                self._engine.scheduler.finish(request)
        if group.beams.is_done:
            self._engine.finish_group(group, self._collect(group, parents[0]))

    def _fork(self, parent: Request) -> Request:
        fork = Request(
            parent.request_id,
            parent.tokens.view(),
            parent.params,
            namespace=parent.namespace,
            priority=parent.priority,
            arrival_s=parent.times.arrival,
        )
        fork.num_prompt_tokens = parent.num_prompt_tokens
        fork.times = parent.times
        fork.num_cached_tokens = parent.num_cached_tokens
        fork.cache_report = parent.cache_report
        fork.group, fork.output = parent.group, parent.output
        fork.sampling_state = parent.sampling_state
        self._engine.scheduler.add_fork(fork, parent)
        return fork

    def _collect(self, group: RequestGroup, first: Request) -> RequestOutput:
        assert group.beams is not None
        outputs = []
        error: str | None = None
        for index, hypothesis in enumerate(group.beams.results()):
            shown = list(hypothesis.tokens)
            if hypothesis.finish_reason == "stop":
                shown.pop()
            text = ""
            try:
                text = self._engine.tokenizer.decode(shown) if self._engine.tokenizer is not None else ""
            except Exception as caught:
                error = f"decoding the output failed: {caught}"
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=list(hypothesis.tokens),
                    cumulative_logprob=hypothesis.logprob,
                    finish_reason=hypothesis.finish_reason if error is None else "error",
                    score=hypothesis.score,
                )
            )
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=first.tokens.view(0, first.num_prompt_tokens).tolist(),
            outputs=outputs,
            num_cached_tokens=first.num_cached_tokens,
            cache_report=first.cache_report,
            num_preemptions=first.num_preemptions,
            num_generated_tokens=sum(len(output.token_ids) for output in outputs),
            times=first.times,
            error=error,
            error_code=None if error is None else "detokenization_failed",
        )


def beam_sampling_params(max_tokens: int) -> SamplingParams:
    """Parameters of a beam's request: nothing of them is used but the length."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
