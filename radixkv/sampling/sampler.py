"""From logits to tokens: one pass over the rows of a step.

What is done to a row, in this order:

    logits processors (bias, penalties, min_tokens, grammar)
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
from radixkv.sampling.logits_processors import apply_processors, prepare_processors
from radixkv.sampling.sampling_state import SamplingState

# Candidates looked at for top_p before falling back to sorting the whole vocabulary.
_TOP_P_CANDIDATES = 1024


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
        One token per request, in order. Nothing of the requests is changed: see `SamplingState.accept`.
    """
    if not rows:
        return []
    processors = [request.sampling_state.processors for request in requests]
    prepare_processors(processors)  # before anything waits for a GPU's logits
    identity = len(rows) == len(logits) and all(row == i for i, row in enumerate(rows))
    raw = (logits if identity else _rows(logits, rows)).float()
    changed = [i for i, own in enumerate(processors) if any(processor.is_active for processor in own)]
    processed = _rows(raw, changed)
    apply_processors(processed, [processors[i] for i in changed])
    # The maximum of a row with a NaN is NaN; one of infinity leaves nothing to compare with.
    best, tokens = (raw if len(changed) < len(rows) else processed).max(dim=1)
    if 0 < len(changed) < len(rows):
        best[changed], tokens[changed] = processed.max(dim=1)
    broken = (~torch.isfinite(best)).tolist()
    chosen = tokens.tolist()
    drawn = [i for i, request in enumerate(requests) if not request.params.is_greedy and not broken[i]]
    if drawn:
        own = _rows(raw, drawn)
        places = {i: j for j, i in enumerate(changed)}
        if both := [(j, places[i]) for j, i in enumerate(drawn) if i in places]:
            own[[j for j, _ in both]] = processed[[place for _, place in both]]
        for i, token in zip(drawn, _draw(own, [requests[i] for i in drawn]), strict=True):
            chosen[i] = token
    result = [SampledToken(-1 if bad else token) for bad, token in zip(broken, chosen, strict=True)]
    wanted = [
        i for i, request in enumerate(requests) if request.params.logprobs is not None and not broken[i]
    ]
    if wanted:
        largest = max(requests[i].params.logprobs or 0 for i in wanted)
        found = gather_logprobs(_rows(raw, wanted), [chosen[i] for i in wanted], largest)
        for i, logprobs in zip(wanted, found, strict=True):
            logprobs.top = logprobs.top[: requests[i].params.logprobs]
            result[i].logprobs = logprobs
    return result


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of some rows [len(rows), V]."""
    return logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device))


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


def _draw(logits: torch.Tensor, requests: Sequence[Sampled]) -> list[int]:
    """One token for each row by temperature, top_k, top_p, min_p and the request's random stream."""
    params = [request.params for request in requests]
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    # Subtract the maximum first: dividing by a tiny temperature must not overflow.
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
    uniform = [request.sampling_state.draw() for request in requests]
    tokens = [0] * len(requests)
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
        # top_p counts what top_k has left; without top_k, the whole vocabulary. A softmax adds up each row on
        # one thread: the sum's bits, and with them the choice, don't depend on the number of threads.
        if params.top_k > 0:
            before = torch.softmax(values[None], -1, dtype=torch.float64)[0].cumsum(0)
        else:
            shares = torch.softmax(scaled[None], -1, dtype=torch.float64)[0]
            before = shares[ids].cumsum(0)
            if wanted < vocab and float(before[-1]) < params.top_p:
                best_all = torch.sort(scaled, descending=True, stable=True)
                values, ids = best_all.values, best_all.indices
                before = shares[ids].cumsum(0)
        # Keep each token before which less than top_p had been reached; always the first.
        keep = torch.ones_like(values, dtype=torch.bool)
        keep[1:] = before[:-1] < params.top_p
        values = values.masked_fill(~keep, -torch.inf)
    if params.min_p > 0.0:
        values = values.masked_fill(values < float(np.log(params.min_p)), -torch.inf)
    return int(ids[_invert(values[None], [uniform])[0]])
