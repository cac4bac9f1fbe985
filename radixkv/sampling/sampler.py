"""From logits to tokens: one pass over the rows of a step.

What is done to a row, in this order:

    logits processors (bias, penalties, min_tokens, grammar)
    -> greedy: argmax
    -> temperature, top_k, top_p, min_p -> one draw by inverse transform sampling

A draw takes one number from the request's own Philox stream (Salmon et al., SC 2011), so a seed gives the
same sample whatever else is in the batch. Reported logprobs are the model's own, before any of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from radixkv.request import SamplingParams
from radixkv.sampling.logits_processors import apply_processors, prepare_processors
from radixkv.sampling.sampling_state import SamplingState

# Neighbouring tokens whose weights are added up before one of them is looked for: about the root of V.
_CHUNK = 256


class Sampled(Protocol):
    """What the sampler needs of a request."""

    params: SamplingParams
    sampling_state: SamplingState


@dataclass(slots=True)
class RawLogprobs:
    """Logprobs of one position as plain numbers: (token, logprob, rank) of the chosen one, and the top k."""

    chosen: tuple[int, float, int]
    top: list[tuple[int, float]]


#: Instead of a token's id: the row is not a number.
NOT_A_NUMBER = -1
#: Instead of a token's id: what changes the request's logits rules out every token.
NOTHING_LEFT = -2


@dataclass(slots=True)
class SampledToken:
    """A chosen token; `token_id` is below 0 where none can be (a fault of that request alone)."""

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
    return [run[0] for run in sample_runs(logits, rows, requests, [()] * len(rows))]


def sample_runs(
    logits: torch.Tensor, rows: Sequence[int], requests: Sequence[Sampled], drafts: Sequence[Sequence[int]]
) -> list[list[SampledToken]]:
    """Choose tokens for each request as far as they are what its draft says, and the one after.

    Each token is the one that `sample` would choose once the tokens before it had been accepted: by the
    request's own random number of that place, and by its logits processors as they would be then.

    Args:
        logits: [S, V], any float dtype; not changed.
        rows: the first row of each request; row + i is that of the token after the first i of its draft.
        requests: as many as `rows`.
        drafts: a guess of the next tokens of each request; empty: one token is chosen.

    Returns:
        For each request the accepted tokens of its draft, then one more, unless its row is broken (below 0,
        where it is the first). Nothing of the requests is changed.
    """
    if not rows:
        return []
    return _Step(logits, rows, requests, drafts).runs()


class _Step:
    """The rows to sample: those of request i lie at [starts[i], starts[i] + 1 + len(drafts[i])).

    Attributes:
        raw: the model's float32 logits [R, V] of all rows.
        processed: the rows that processors have changed, as they have left them.
        places: row -> its place in `processed`.
        chosen: the likeliest token of each row; of rows that are drawn, the one drawn.
        broken: rows that are no numbers.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        requests: Sequence[Sampled],
        drafts: Sequence[Sequence[int]],
    ) -> None:
        self.requests, self.drafts = requests, drafts
        # Before anything waits for a GPU's logits.
        prepare_processors([request.sampling_state.processors for request in requests])
        self.starts: Sequence[int] = range(len(rows))
        wanted = rows
        if any(drafts):
            sizes = [1 + len(draft) for draft in drafts]
            self.starts = [0, *itertools.accumulate(sizes[:-1])]
            wanted = [row + i for row, size in zip(rows, sizes, strict=True) for i in range(size)]
        self.raw = _rows(logits, wanted).float()
        self.places: dict[int, int] = {}
        self.processed = self._process()
        # The maximum of a row with a NaN is NaN; one of infinity leaves nothing to compare with.
        if len(self.places) < len(self.raw):
            best, tokens = self.raw.max(dim=1)
            if self.places:
                changed = list(self.places)
                best[changed], tokens[changed] = self.processed.max(dim=1)
        else:
            order = [self.places[row] for row in range(len(self.raw))]
            best, tokens = (column[order] for column in self.processed.max(dim=1))
        self.broken: list[bool] = (~torch.isfinite(best)).tolist()
        self.chosen: list[int] = tokens.tolist()

    def _process(self) -> torch.Tensor:
        """The rows that processors change: a request's first, then the next as if its draft were accepted."""
        states = [request.sampling_state for request in self.requests]
        remaining = [i for i, state in enumerate(states) if state.processors]
        if not remaining:
            return self.raw[:0]
        accepted = [0] * len(states)
        blocks: list[torch.Tensor] = []
        depth = 0
        try:
            while remaining:
                # After the end of a complete output, nothing is chosen.
                going_on = remaining if depth == 0 else [i for i in remaining if not states[i].is_complete]
                active = [i for i in going_on if any(p.is_active for p in states[i].processors)]
                rows = [self.starts[i] + depth for i in active]
                block = _copy(self.raw, rows)
                apply_processors(block, [states[i].processors for i in active])
                for row in rows:
                    self.places[row] = len(self.places)
                blocks.append(block)
                # Where a processor has failed nothing is allowed, and no run gets further.
                remaining = [
                    i for i in remaining if depth < len(self.drafts[i]) and states[i].failure is None
                ]
                for i in remaining:
                    states[i].accept(self.drafts[i][depth])
                    accepted[i] += 1
                depth += 1
        finally:
            for i, count in enumerate(accepted):
                if count:
                    states[i].roll_back(count)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def runs(self) -> list[list[SampledToken]]:
        """The tokens of each request. Rows are drawn one after the other while they agree with the draft."""
        starts, broken, chosen = self.starts, self.broken, self.chosen
        drawing = [
            i
            for i, request in enumerate(self.requests)
            if not request.params.is_greedy and not broken[starts[i]]
        ]
        depth = 0
        while drawing:
            own = self._logits([starts[i] + depth for i in drawing])
            tokens = _draw(own, [self.requests[i] for i in drawing], depth)
            for i, token in zip(drawing, tokens, strict=True):
                chosen[starts[i] + depth] = token
            depth += 1
            drawing = [i for i in drawing if self.drafts[i] and self._goes_on(i, depth)]
            drawing = [i for i in drawing if not broken[starts[i] + depth]]
        runs: list[list[SampledToken]] = []
        for i, start in enumerate(starts):
            run = [SampledToken(self._fault(start) if broken[start] else chosen[start])]
            # What is broken after tokens that are right is so in the next step, too, if it is no mere guess.
            while self.drafts[i] and self._goes_on(i, len(run)) and not broken[start + len(run)]:
                run.append(SampledToken(chosen[start + len(run)]))
            runs.append(run)
        self._add_logprobs(runs)
        return runs

    def _fault(self, row: int) -> int:
        """Why no token of a broken row can be chosen."""
        return NOTHING_LEFT if row in self.places and self.raw[row].max().isfinite() else NOT_A_NUMBER

    def _goes_on(self, i: int, depth: int) -> bool:
        """Whether the run of request i goes on after its first `depth` tokens: the draft has them, too."""
        draft = self.drafts[i]
        if depth > len(draft):
            return False
        before = self.starts[i] + depth - 1
        return self.chosen[before] == draft[depth - 1] and not self.broken[before]

    def _logits(self, rows: list[int]) -> torch.Tensor:
        """Some rows as the processors left them, not to be written to."""
        changed = [(j, self.places[row]) for j, row in enumerate(rows) if row in self.places]
        if len(changed) == len(rows):
            return _rows(self.processed, [place for _, place in changed])
        if not changed:
            return _rows(self.raw, rows)
        own = _copy(self.raw, rows)
        own[[j for j, _ in changed]] = self.processed[[place for _, place in changed]]
        return own

    def _add_logprobs(self, runs: list[list[SampledToken]]) -> None:
        wanted: list[tuple[int, int, SampledToken]] = []  # row, most likely ones wanted, token
        for i, request in enumerate(self.requests):
            most = request.params.logprobs
            if most is not None:
                start, run = self.starts[i], runs[i]
                wanted.extend((start + k, most, token) for k, token in enumerate(run) if token.token_id >= 0)
        if not wanted:
            return
        own = _rows(self.raw, [row for row, _, _ in wanted])
        largest = max(most for _, most, _ in wanted)
        found = gather_logprobs(own, [token.token_id for _, _, token in wanted], largest)
        for (_, most, token), logprobs in zip(wanted, found, strict=True):
            logprobs.top = logprobs.top[:most]
            token.logprobs = logprobs


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows [len(rows), V]: the very tensor where they are all of its rows."""
    if len(rows) == len(logits) and all(row == i for i, row in enumerate(rows)):
        return logits
    return _copy(logits, rows)


def _copy(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
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


def _draw(logits: torch.Tensor, requests: Sequence[Sampled], ahead: int) -> list[int]:
    """One token for each row by temperature, top_k, top_p, min_p and the request's random stream.

    Args:
        ahead: how many tokens come before this one that the requests have not got yet.
    """
    params = [request.params for request in requests]
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    # Subtract the maximum first: dividing by a tiny temperature must not overflow.
    scaled = (logits - logits.amax(dim=1, keepdim=True)).div_(temperature[:, None])
    uniform = [request.sampling_state.draw(ahead) for request in requests]
    tokens = [0] * len(requests)
    plain = [j for j, p in enumerate(params) if p.top_k <= 0 and p.top_p >= 1.0]
    if plain:
        kept = scaled if len(plain) == len(params) else scaled[plain]
        if any(params[j].min_p > 0.0 for j in plain):
            floor = torch.tensor([params[j].min_p for j in plain], dtype=torch.float32, device=device)
            kept = kept.masked_fill(kept < floor.log()[:, None], -torch.inf)
        for j, token in zip(plain, _invert(kept, [uniform[j] for j in plain]), strict=True):
            tokens[j] = token
    for j, p in enumerate(params):
        if p.top_k > 0 or p.top_p < 1.0:
            tokens[j] = _draw_filtered(scaled[j], p, uniform[j])
    return tokens


def _invert(scaled: torch.Tensor, uniform: Sequence[float]) -> list[int]:
    """Inverse transform sampling over the last axis of logits [R, N]; long rows in two levels.

    Sums are in float64, so that no tail is lost: first of chunks of the row, then within the one chunk that
    is hit. A row's sums depend on nothing but the row: neither on the others nor on the number of threads.
    """
    # Where there are infinities, its exponentials are faster than those of `exp`.
    weights = torch.softmax(scaled, dim=1)
    numbers = torch.tensor(uniform, dtype=torch.float64, device=scaled.device)[:, None]
    if weights.shape[1] <= _CHUNK:
        sums = weights.double().cumsum(dim=1)
        return _first_above(sums, numbers * sums[:, -1:])[:, 0].tolist()
    missing = -weights.shape[1] % _CHUNK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    chunks = weights.view(len(weights), -1, _CHUNK)
    ends = chunks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target = numbers * ends[:, -1:]
    chunk = _first_above(ends, target)
    within = chunks.gather(1, chunk[:, :, None].expand(-1, 1, _CHUNK))[:, 0].double().cumsum(dim=1)
    start = torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    return (chunk * _CHUNK + _first_above(within, target - start))[:, 0].tolist()


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place of each row of running sums [R, N] that is above its target [R, 1]: int64 [R, 1].

    A weight of 0 is never hit: where rounding has pushed the target to the very end, the place is that of
    the last other one.
    """
    return torch.minimum(
        torch.searchsorted(sums, target, right=True), torch.searchsorted(sums, sums[:, -1:].contiguous())
    )


def _draw_filtered(scaled: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """One draw from a row [V] with top_k and/or top_p, over candidates sorted by descending logit."""
    if params.top_k > 0:
        best = torch.topk(scaled, min(params.top_k, len(scaled)))
        values, ids = best.values, best.indices
        shares = torch.softmax(values, -1)  # top_p counts what top_k has left
    else:
        # Tokens rarer than this make up less than 1 - top_p together: they come after what is kept.
        shares = torch.softmax(scaled, -1)
        ids = (shares > 0.5 * (1.0 - params.top_p) / len(scaled)).nonzero()[:, 0]
        shares, order = torch.sort(shares[ids], descending=True, stable=True)
        ids = ids[order]
        values = scaled[ids]
    if params.top_p < 1.0:
        before = shares.double().cumsum(0)
        # Keep each token before which less than top_p had been reached; always the first.
        keep = torch.ones_like(values, dtype=torch.bool)
        keep[1:] = before[:-1] < params.top_p
        values = values.masked_fill(~keep, -torch.inf)
    if params.min_p > 0.0:
        values = values.masked_fill(values < float(np.log(params.min_p)), -torch.inf)
    return int(ids[_invert(values[None], [uniform])[0]])
