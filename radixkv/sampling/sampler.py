"""From logits to tokens: one pass over the rows of a step.

The order of what is done to a row (as in transformers' logits processors):

    logit_bias, repetition / presence / frequency penalties, min_tokens
    -> greedy: argmax
    -> temperature, top_k, top_p, min_p -> one draw by inverse transform sampling

A draw takes one number from the request's own Philox stream (Salmon et al., SC 2011), so a seed gives the
same sample whatever else is in the batch. Reported logprobs are the model's own, before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from radixkv.request import SamplingParams

# Candidates looked at for top_p before falling back to sorting the whole vocabulary.
_TOP_P_CANDIDATES = 1024


class RandomStream:
    """Uniform numbers in [0, 1) for one sample: a Philox stream keyed by the seed."""

    __slots__ = ("_count", "_generator", "_last")

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
        self._count = 0
        self._last = 0.0

    def at(self, index: int) -> float:
        """Number `index` of the stream. The last one may be asked for again, by a step that is run again."""
        assert index >= self._count - 1, "the stream does not go back"
        while self._count <= index:
            self._last = float(self._generator.random())
            self._count += 1
        return self._last


class SamplingState:
    """What sampling remembers of one request: its random stream, and counts for the penalties.

    Args:
        seed: of the random stream; any integer.
        prompt_token_ids: for the repetition penalty.
        end_token_ids: tokens that must not be chosen before `min_tokens`.
    """

    __slots__ = ("_bias", "_counts", "_end", "_params", "_prompt", "_seen", "num_generated", "random")

    def __init__(
        self, params: SamplingParams, seed: int, prompt_token_ids: Sequence[int], end_token_ids: Sequence[int]
    ) -> None:
        self.random = RandomStream(seed)
        self.num_generated = 0
        self._params = params
        self._prompt = prompt_token_ids
        self._end = torch.tensor(sorted(set(end_token_ids)), dtype=torch.int64)
        self._counts: torch.Tensor | None = None  # int32 [V], generated tokens
        self._seen: torch.Tensor | None = None  # bool [V], prompt and generated tokens
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None

    def draw(self) -> float:
        """The random number for the next token; the same until `record` is called."""
        return self.random.at(self.num_generated)

    def record(self, token_id: int) -> None:
        """The request has got this token. Called by the engine: a step that fails gives nobody a token."""
        self.num_generated += 1
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True

    @property
    def changes_logits(self) -> bool:
        """Whether `apply` would do anything at this point."""
        params = self._params
        return bool(
            params.logit_bias
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or self.num_generated < params.min_tokens
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Change one row [V] of float32 logits in place: bias, penalties, min_tokens."""
        params, device = self._params, logits.device
        if params.logit_bias:
            if self._bias is None:
                ids = torch.tensor(list(params.logit_bias.keys()), dtype=torch.int64, device=device)
                self._bias = ids, torch.tensor(list(params.logit_bias.values()), device=device)
            logits.index_add_(0, self._bias[0], self._bias[1].to(logits.dtype))
        if params.repetition_penalty != 1.0:
            if self._seen is None:
                self._seen = torch.zeros(len(logits), dtype=torch.bool, device=device)
                self._seen[torch.as_tensor(np.asarray(self._prompt), dtype=torch.int64, device=device)] = True
            p = params.repetition_penalty
            logits.copy_(torch.where(self._seen, torch.where(logits > 0, logits / p, logits * p), logits))
        if params.presence_penalty or params.frequency_penalty:
            if self._counts is None:
                self._counts = torch.zeros(len(logits), dtype=torch.int32, device=device)
            logits -= params.frequency_penalty * self._counts
            logits -= params.presence_penalty * (self._counts > 0)
        if self.num_generated < params.min_tokens and len(self._end):
            ends = self._end[(self._end >= 0) & (self._end < len(logits))]  # others can't be chosen anyway
            logits[ends.to(device)] = -torch.inf

    def fork(self, seed: int) -> SamplingState:
        """The state of another sample of the same prompt, before its first token."""
        assert self.num_generated == 0
        return SamplingState(self._params, seed, self._prompt, self._end.tolist())


class Sampled(Protocol):
    """What the sampler needs of a request."""

    params: SamplingParams
    sampling_state: SamplingState


@dataclass(slots=True)
class RawLogprobs:
    """Logprobs of one position as plain numbers: (token, logprob, rank) of the chosen one, and the top k."""

    chosen: tuple[int, float, int]
    top: list[tuple[int, float]]


@dataclass(slots=True)
class SampledToken:
    """A chosen token; `token_id` is -1 when the row was not a number (a fault of that request alone)."""

    token_id: int
    logprobs: RawLogprobs | None = None


def sample(logits: torch.Tensor, rows: Sequence[int], requests: Sequence[Sampled]) -> list[SampledToken]:
    """Choose one token per request.

    Args:
        logits: [S, V], any float dtype; not changed.
        rows: the row of `logits` for each request; several requests may share one.
        requests: as many as `rows`.

    Returns:
        One token per request, in order. Nothing of the requests is changed: see `SamplingState.record`.
    """
    if not rows:
        return []
    identity = len(rows) == len(logits) and all(row == i for i, row in enumerate(rows))
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    own = (logits if identity else logits.index_select(0, index)).float()
    raw = own
    if any(request.sampling_state.changes_logits for request in requests):
        own = own.clone()
        for i, request in enumerate(requests):
            if request.sampling_state.changes_logits:
                request.sampling_state.apply(own[i])
    # The maximum of a row with a NaN is NaN; one of infinity leaves nothing to compare with.
    best, tokens = own.max(dim=1)
    broken = (~torch.isfinite(best)).tolist()
    chosen = tokens.tolist()
    drawn = [i for i, request in enumerate(requests) if not request.params.is_greedy and not broken[i]]
    if drawn:
        for i, token in zip(drawn, _draw(own, drawn, requests), strict=True):
            chosen[i] = token
    result = [SampledToken(-1 if bad else token) for bad, token in zip(broken, chosen, strict=True)]
    wanted = [
        i for i, request in enumerate(requests) if request.params.logprobs is not None and not broken[i]
    ]
    if wanted:
        largest = max(requests[i].params.logprobs or 0 for i in wanted)
        found = gather_logprobs(raw[wanted], [chosen[i] for i in wanted], largest)
        for i, logprobs in zip(wanted, found, strict=True):
            logprobs.top = logprobs.top[: requests[i].params.logprobs]
            result[i].logprobs = logprobs
    return result


def gather_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[RawLogprobs]:
    """Log-softmax of float rows [R, V], read at one token per row and at the `num_top` likeliest."""
    logprobs = torch.log_softmax(logits.float(), dim=1)
    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    own = logprobs.gather(1, index)
    ranks = ((logprobs > own).sum(dim=1) + 1).tolist()
    values = own[:, 0].tolist()
    top: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if num_top:
        best = torch.topk(logprobs, min(num_top, logprobs.shape[1]), dim=1)
        top = [
            list(zip(ids, lps, strict=True))
            for ids, lps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    return [
        RawLogprobs((token, value, rank), likeliest)
        for token, value, rank, likeliest in zip(tokens, values, ranks, top, strict=True)
    ]


def _draw(logits: torch.Tensor, rows: list[int], requests: Sequence[Sampled]) -> list[int]:
    """One token for each of `rows` by temperature, top_k, top_p, min_p and the request's random stream."""
    params = [requests[i].params for i in rows]
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    # Subtract the maximum first: dividing by a tiny temperature must not overflow.
    own = logits[rows] if len(rows) < len(logits) else logits
    scaled = (own - own.amax(dim=1, keepdim=True)) / temperature[:, None]
    uniform = [requests[i].sampling_state.draw() for i in rows]
    tokens = [0] * len(rows)
    plain = [j for j, p in enumerate(params) if p.top_k <= 0 and p.top_p >= 1.0]
    if plain:
        kept = scaled[plain]
        floor = torch.tensor([params[j].min_p for j in plain], dtype=torch.float32, device=device)
        kept = kept.masked_fill(kept < floor.log()[:, None], -torch.inf)
        for j, token in zip(plain, _invert(kept, [uniform[j] for j in plain]), strict=True):
            tokens[j] = token
    for j, p in enumerate(params):
        if p.top_k > 0 or p.top_p < 1.0:
            tokens[j] = _draw_filtered(scaled[j], p, uniform[j])
    return tokens


def _invert(scaled: torch.Tensor, uniform: Sequence[float]) -> list[int]:
    """Inverse transform sampling over the last axis; sums in float64, so that no tail is lost."""
    cumulative = torch.softmax(scaled, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = torch.tensor(uniform, dtype=torch.float64, device=scaled.device) * cumulative[..., -1]
    # right=True: a target of 0 skips tokens of probability 0.
    found = torch.searchsorted(cumulative, target[..., None], right=True)[..., 0]
    # Rounding may push the target to the very end, where tokens of probability 0 can lie.
    last = cumulative.shape[-1] - 1 - (scaled.flip(-1) > -torch.inf).int().argmax(dim=-1)
    return torch.minimum(found, last).tolist()


def _draw_filtered(scaled: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """One draw from a row [V] with top_k and/or top_p, over candidates sorted by descending logit."""
    vocab = len(scaled)
    wanted = min(params.top_k, vocab) if params.top_k > 0 else min(_TOP_P_CANDIDATES, vocab)
    best = torch.topk(scaled, wanted)
    values, ids = best.values, best.indices
    if params.top_p < 1.0:
        # top_p counts what top_k has left; without top_k, the whole vocabulary.
        total = torch.logsumexp((values if params.top_k > 0 else scaled).double(), 0)
        before = (values.double() - total).exp().cumsum(0)
        if params.top_k <= 0 and wanted < vocab and float(before[-1]) < params.top_p:
            best_all = torch.sort(scaled, descending=True, stable=True)
            values, ids = best_all.values, best_all.indices
            before = (values.double() - total).exp().cumsum(0)
        # Keep each token before which less than top_p had been reached; always the first.
        keep = torch.ones_like(values, dtype=torch.bool)
        keep[1:] = before[:-1] < params.top_p
        values = values.masked_fill(~keep, -torch.inf)
    if params.min_p > 0.0:
        values = values.masked_fill(values < float(np.log(params.min_p)), -torch.inf)
    return int(ids[_invert(values[None], [uniform])[0]])
