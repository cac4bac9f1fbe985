# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: one pass over the rows of a step.

A row goes through, in this order:

    logits processors (bias, penalties, min_tokens, grammar)
    -> greedy: argmax
    -> temperature, top_k, top_p, min_p -> one draw by inverse transform sampling

A draw takes one number from the request's own Philox stream (Salmon et al., SC 2011), so a seed gives the
same sample whatever else is in the batch. Reported logprobs are the model's own, before any of this.

A step waits for its device once, when all of this has been launched (`Sampling`): until then it is unknown
which rows are broken or which guesses of a draft are right, so every row is worked on. It waits once more
only if the candidates of some draws did not suffice (see `draws`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from radixkv.sampling.device_arrays import Fetch, frees_memory, to_device
from radixkv.sampling.device_counts import DeviceCounts
from radixkv.sampling.draws import draw
from radixkv.sampling.logits_processors import FedTokens, apply_processors, prepare_processors
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState


class Sampled(Protocol):
    """The attributes of a request that the sampler reads."""

    params: SamplingParams
    sampling_state: SamplingState


@dataclass(slots=True)
class RawLogprobs:
    """Logprobs of one position as plain numbers: (token, logprob, rank) of the chosen, others' by token."""

    chosen: tuple[int, float, int]
    top: list[tuple[int, float]]
    named: dict[int, float] = field(default_factory=dict)


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
    return Sampling(logits, rows, requests, drafts).runs() if rows else []


class Sampling:
    """A step whose tokens are being chosen; see `sample_runs` for the arguments.

    The rows of request i lie at [starts[i], starts[i] + 1 + len(drafts[i])).

    Args:
        fed: the tokens of each request that a step before still chooses; None: the host knows all. No
            processor of such a request waits for them.
        memory: counts of tokens on the device; None: penalties send the places that they change.

    Attributes:
        tokens: int64 [R], on the logits' device, the token of each row unless its candidates did not suffice.
        first_chosen: the same on the host, once `runs` has been called.
        raw: the model's float32 logits [R, V] of all rows.
        processed: the rows that processors have changed, as they have left them.
        places: row -> its place in `processed`.
        drawing: (row, parameters, random number) of all rows to draw.
        reported: (row, parameters) of all rows whose logprobs may be wanted.
        chosen: the likeliest token of each row; of rows that are drawn, the one drawn.
        broken: rows that are not numbers.
        logprobs: logprobs of `reported`, by row.
    """

    @frees_memory()
    def __init__(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        requests: Sequence[Sampled],
        drafts: Sequence[Sequence[int]],
        fed: FedTokens | None = None,
        memory: DeviceCounts | None = None,
    ) -> None:
        self.requests, self.drafts = requests, drafts
        # Before anything waits for a GPU's logits.
        prepare_processors([request.sampling_state.processors for request in requests])
        self.starts: Sequence[int] = range(len(rows))
        wanted = rows
        sizes = [1 + len(draft) for draft in drafts]
        if any(drafts):
            self.starts = [0, *itertools.accumulate(sizes[:-1])]
            wanted = [row + i for row, size in zip(rows, sizes, strict=True) for i in range(size)]
        self.raw = _rows(logits, wanted).float()
        self.places: dict[int, int] = {}
        self._fed, self._memory = fed, memory
        self.processed = self._process()
        self.drawing: list[tuple[int, SamplingParams, float]] = []
        self.reported: list[tuple[int, SamplingParams]] = []
        for at, (request, start, size) in enumerate(zip(requests, self.starts, sizes, strict=True)):
            if not request.params.is_greedy:
                late = int(fed is not None and fed.places[at] >= 0)
                draw_at = request.sampling_state.draw
                self.drawing += [(start + i, request.params, draw_at(late + i)) for i in range(size)]
            if request.params.reports_logprobs:
                self.reported.extend((start + i, request.params) for i in range(size))
        self.chosen: list[int]
        self.first_chosen: list[int] = []
        self.broken: list[bool]
        self.logprobs: dict[int, RawLogprobs] = {}
        self._choose()

    def _process(self) -> torch.Tensor:
        """Let processors change rows: a request's first, then the next ones as if its draft were accepted."""
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
                active = [i for i in going_on if self._is_active(i, states[i])]
                rows = [self.starts[i] + depth for i in active]
                block = _copy(self.raw, rows)
                processors = [states[i].processors for i in active]
                apply_processors(block, processors, self._memory, self._fed_rows(active))
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

    def _is_active(self, request: int, state: SamplingState) -> bool:
        """Return True if processors change a request's logits, or will once its token is counted."""
        is_fed = self._fed is not None and self._fed.places[request] >= 0
        return is_fed or any(processor.is_active for processor in state.processors)

    def _fed_rows(self, requests: Sequence[int]) -> FedTokens | None:
        """Return the tokens that the host does not know of some requests; None: it knows all."""
        fed = self._fed
        if fed is None:
            return None
        order = list(itertools.accumulate((place >= 0 for place in fed.places), initial=0))
        own = [order[i] for i in requests if fed.places[i] >= 0]
        if not own:
            return None
        return FedTokens(fed.chosen, [fed.places[i] for i in requests], _copy(fed.tokens, own))

    def _choose(self) -> None:
        """Choose a token for each row."""
        device = self.raw.device
        # The maximum of a row with a NaN is NaN; one of infinity leaves nothing to compare with.
        if len(self.places) < len(self.raw):
            best, tokens = self.raw.max(dim=1)
            if self.places:
                changed = to_device(list(self.places), device)
                likeliest = self.processed.max(dim=1)
                best.index_copy_(0, changed, likeliest.values)
                tokens.index_copy_(0, changed, likeliest.indices)
        else:
            order = to_device([self.places[row] for row in range(len(self.raw))], device)
            best, tokens = (column.index_select(0, order) for column in self.processed.max(dim=1))
        self.tokens, missing = self._draw(tokens, self.drawing)
        columns = [self.tokens, torch.isfinite(best)] + ([] if missing is None else [missing])
        self._num_columns = len(columns)
        self._fetch = Fetch([*columns, *self._logprobs(self.tokens, self.reported)])

    def _wait(self) -> None:
        """Wait for the launched work, and read it."""
        fetched = self._fetch.wait()
        self.first_chosen += [int(token) for token in fetched[0]]
        self.chosen = self.first_chosen
        self.broken = [not is_finite for is_finite in fetched[1]]
        self._read_logprobs(self.reported, fetched[self._num_columns :])
        if self._num_columns > 2 and any(fetched[2]):
            self._choose_again(self.tokens, [flag > 0 for flag in fetched[2]])

    def _choose_again(self, tokens: torch.Tensor, missing: Sequence[bool]) -> None:
        """Draw rows again if their candidates did not suffice."""
        drawing = [own for own, again in zip(self.drawing, missing, strict=True) if again]
        rows = {row for row, _, _ in drawing}
        reported = [own for own in self.reported if own[0] in rows]
        tokens, _ = self._draw(tokens, drawing, whole=True)
        chosen, *columns = Fetch([tokens, *self._logprobs(tokens, reported)]).wait()
        self.chosen = [int(token) for token in chosen]
        self._read_logprobs(reported, columns)

    def _draw(
        self,
        tokens: torch.Tensor,
        drawing: Sequence[tuple[int, SamplingParams, float]],
        *,
        whole: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All tokens, including rows to draw again; of these, a flag that the candidates did not suffice."""
        if not drawing:
            return tokens, None
        rows = [row for row, _, _ in drawing]
        params, numbers = [own[1] for own in drawing], [own[2] for own in drawing]
        drawn = draw(self._logits(rows), params, numbers, whole=whole)
        if len(rows) == len(tokens):
            return drawn.tokens, drawn.missing
        return tokens.index_copy(0, to_device(rows, tokens.device), drawn.tokens), drawn.missing

    @frees_memory()
    def runs(self) -> list[list[SampledToken]]:
        """Return the tokens of each request: the agreeing beginning of its draft, and one more.

        Waits for the device; to be called once.
        """
        self._wait()
        broken, chosen = self.broken, self.chosen
        runs: list[list[SampledToken]] = []
        for i, start in enumerate(self.starts):
            if broken[start]:
                runs.append([SampledToken(self._fault(start))])
                continue
            run = [SampledToken(chosen[start], self.logprobs.get(start))]
            # A row broken after right tokens is broken in the next step, too, unless it is a mere guess.
            for row, guess in enumerate(self.drafts[i], start + 1):
                if chosen[row - 1] != guess or broken[row]:
                    break
                run.append(SampledToken(chosen[row], self.logprobs.get(row)))
            runs.append(run)
        return runs

    def _fault(self, row: int) -> int:
        """Return why no token of a broken row can be chosen."""
        return NOTHING_LEFT if row in self.places and self.raw[row].max().isfinite() else NOT_A_NUMBER

    def _logits(self, rows: list[int]) -> torch.Tensor:
        """Return some rows as the processors left them, not to be written to."""
        changed = [(j, self.places[row]) for j, row in enumerate(rows) if row in self.places]
        if len(changed) == len(rows):
            return _rows(self.processed, [place for _, place in changed])
        if not changed:
            return _rows(self.raw, rows)
        own = _copy(self.raw, rows)
        at = to_device([j for j, _ in changed], own.device)
        return own.index_copy_(0, at, _copy(self.processed, [place for _, place in changed]))

    def _logprobs(
        self, tokens: torch.Tensor, reported: Sequence[tuple[int, SamplingParams]]
    ) -> list[torch.Tensor]:
        """Return logprobs of the chosen and of named tokens, for `_read_logprobs`."""
        if not reported:
            return []
        rows = [row for row, _ in reported]
        own = tokens if len(rows) == len(tokens) else _copy(tokens, rows)
        most = max(params.logprobs or 0 for _, params in reported)
        named = [params.logprob_token_ids or () for _, params in reported]
        return _logprob_columns(_rows(self.raw, rows), own, most, named)

    def _read_logprobs(
        self, reported: Sequence[tuple[int, SamplingParams]], columns: Sequence[list[float]]
    ) -> None:
        if reported:
            tokens = [self.chosen[row] for row, _ in reported]
            named = [params.logprob_token_ids or () for _, params in reported]
            read = _read_columns(tokens, columns, named)
            for (row, params), own in zip(reported, read, strict=True):
                own.top = own.top[: params.logprobs or 0]
                self.logprobs[row] = own


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows [len(rows), V]: the very tensor where they are all of its rows."""
    if len(rows) == len(logits) and all(row == i for i, row in enumerate(rows)):
        return logits
    return _copy(logits, rows)


def _copy(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits.index_select(0, to_device(rows, logits.device))


def gather_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[RawLogprobs]:
    """Return log-softmax of float rows [R, V], at one token per row and at the `num_top` likeliest."""
    columns = _logprob_columns(logits, to_device(tokens, logits.device), num_top)
    return _read_columns(tokens, Fetch(columns).wait())


def _logprob_columns(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, named: Sequence[Sequence[int]] = ()
) -> list[torch.Tensor]:
    """Return each row's logprob of its token, how many are likelier, its named tokens', and the likeliest."""
    logprobs = torch.log_softmax(logits.float(), dim=1)
    own = logprobs.gather(1, tokens[:, None])
    columns = [own, (logprobs > own).sum(dim=1)]
    if any(named):
        rows = [row for row, ids in enumerate(named) for _ in ids]
        flat = [token for ids in named for token in ids]
        columns.append(logprobs[to_device(rows, logits.device), to_device(flat, logits.device)])
    if num_top:
        columns += _likeliest(logprobs, min(num_top, logprobs.shape[1]))
    return columns


def _likeliest(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and logprobs of the `count` likeliest tokens of each row [R, V]; equal ones in id order.

    `topk` alone returns any of the tokens that tie for the last places, in any order.
    """
    least = torch.topk(logprobs, count, dim=1).values[:, -1:]
    by_id = -torch.arange(logprobs.shape[1], dtype=torch.float32, device=logprobs.device)
    keys = torch.where(logprobs == least, by_id, -torch.inf).masked_fill_(logprobs > least, 1.0)
    ids = torch.topk(keys, count, dim=1).indices.sort(dim=1).values
    values, order = logprobs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values


def _read_columns(
    tokens: Sequence[int], columns: Sequence[list[float]], named: Sequence[Sequence[int]] = ()
) -> list[RawLogprobs]:
    values, likelier, *top = columns
    others: list[dict[int, float]] = [{} for _ in tokens]
    if any(named):
        flat = iter(top.pop(0))
        others = [dict(zip(ids, flat, strict=False)) for ids in named]
    likeliest: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if top:
        size = len(top[0]) // len(tokens)
        pairs = [(int(token), value) for token, value in zip(*top, strict=True)]
        likeliest = [pairs[i * size : (i + 1) * size] for i in range(len(tokens))]
    return [
        RawLogprobs((token, value, int(count) + 1), own, named)
        for token, value, count, own, named in zip(tokens, values, likelier, likeliest, others, strict=True)
    ]
