# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: one pass over the rows of a step.

A row goes through, in this order:

    logits processors (bias, penalties, min_tokens, grammar)
    -> greedy: argmax
    -> temperature, top_k, top_p, min_p -> one draw by inverse transform sampling

A draw takes one number from the request's own Philox stream (Salmon et al., SC 2011), so a seed gives the
same sample whatever else is in the batch. Reported logprobs are the model's own, before any of this.

A step waits for its device once, when all of this has been launched (`Sampling`): until then it is unknown
which rows are broken or which guesses of a draft are right, so every row is worked on. On a GPU, all tokens
of a step are chosen by one kernel, which reads the model's logits where they are, and applies masks as bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from radixkv.sampling.device_arrays import Fetch, frees_memory, to_device
from radixkv.sampling.device_counts import DeviceCounts
from radixkv.sampling.device_draws import choose_on_device
from radixkv.sampling.draws import draw
from radixkv.sampling.logits_processors import (
    FedTokens,
    TokenMask,
    apply_processors,
    by_kind,
    prepare_processors,
)
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
#: The same by what the kernel says of a row.
FAULTS = (0, NOT_A_NUMBER, NOTHING_LEFT)


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
    logits: torch.Tensor,
    rows: Sequence[int],
    requests: Sequence[Sampled],
    drafts: Sequence[Sequence[int]],
    *,
    by_kernel: bool | None = None,
) -> list[list[SampledToken]]:
    """Choose tokens for each request as far as they are what its draft says, and the one after.

    Each token is the one that `sample` would choose once the tokens before it had been accepted: by the
    request's own random number of that place, and by its logits processors as they would be then.

    Args:
        logits: [S, V], any float dtype; not changed.
        rows: the first row of each request; row + i is that of the token after the first i of its draft.
        requests: as many as `rows`.
        drafts: a guess of the next tokens of each request; empty: one token is chosen.
        by_kernel: whether the GPU's kernel chooses; None: where the logits are on a GPU.

    Returns:
        For each request the accepted tokens of its draft, then one more, unless its row is broken (below 0,
        where it is the first). Nothing of the requests is changed.
    """
    return Sampling(logits, rows, requests, drafts, by_kernel=by_kernel).runs() if rows else []


class Sampling:
    """A step whose tokens are being chosen; see `sample_runs` for the arguments.

    The rows of request i lie at [starts[i], starts[i] + 1 + len(drafts[i])).

    Args:
        fed: the tokens of each request that a step before still chooses; None: the host knows all. No
            processor of such a request waits for them.
        memory: counts of tokens on the device; None: penalties send the places that they change.

    Attributes:
        tokens: int64 [R], on the logits' device, the token of each row.
        first_chosen: the same on the host, once `runs` has been called.
        raw: rows of the model's logits, in which row r lies at `_at[r]`; float32 on a CPU.
        processed: the rows that processors have changed, as they have left them.
        places: row -> its place in `processed`.
        masks: row -> bits of its allowed tokens, where the kernel applies them.
        drawing: (row, parameters, random number) of all rows to draw.
        reported: (row, parameters) of all rows whose logprobs may be wanted.
        faults: of each row, why it has no token (below 0).
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
        *,
        by_kernel: bool | None = None,
    ) -> None:
        self._by_kernel = logits.device.type == "cuda" if by_kernel is None else by_kernel
        self.requests, self.drafts = requests, drafts
        # Before anything waits for a GPU's logits.
        prepare_processors([request.sampling_state.processors for request in requests])
        self.starts: Sequence[int] = range(len(rows))
        wanted = rows
        sizes = [1 + len(draft) for draft in drafts]
        if any(drafts):
            self.starts = [0, *itertools.accumulate(sizes[:-1])]
            wanted = [row + i for row, size in zip(rows, sizes, strict=True) for i in range(size)]
        self.raw, self._at = (
            (logits, wanted) if self._by_kernel else (_rows(logits, wanted).float(), range(len(wanted)))
        )
        self.places: dict[int, int] = {}
        self.masks: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
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
        self.first_chosen: list[int] = []
        self.faults: list[int]
        self.logprobs: dict[int, RawLogprobs] = {}
        self._choose()

    def _process(self) -> torch.Tensor:
        """Let processors change rows: a request's first, then the next ones as if its draft were accepted."""
        states = [request.sampling_state for request in self.requests]
        remaining = [i for i, state in enumerate(states) if state.processors]
        accepted = [0] * len(states)
        blocks: list[torch.Tensor] = []
        depth = 0
        try:
            while remaining:
                # After the end of a complete output, nothing is chosen.
                going_on = remaining if depth == 0 else [i for i in remaining if not states[i].is_complete]
                places = () if self._fed is None else [self._fed.places[i] for i in going_on]
                kinds = by_kind([states[i].processors for i in going_on], places)
                if self._by_kernel:
                    self._take_masks([self.starts[i] + depth for i in going_on], kinds)
                changed = sorted({i for own, _ in kinds.values() for i in own})
                if len(changed) < len(going_on):
                    at = {i: row for row, i in enumerate(changed)}
                    kinds = {kind: ([at[i] for i in own], each) for kind, (own, each) in kinds.items()}
                    going_on = [going_on[i] for i in changed]
                if going_on:
                    rows = [self.starts[i] + depth for i in going_on]
                    block = _copy(self.raw, [self._at[row] for row in rows]).float()
                    apply_processors(block, kinds, self._memory, self._fed_rows(going_on))
                    self.places.update(zip(rows, itertools.count(len(self.places)), strict=False))
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
        if not blocks:
            return self.raw.new_empty(0, self.raw.shape[1], dtype=torch.float32)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _take_masks(self, rows: Sequence[int], kinds: dict[type[Any], tuple[list[int], list[Any]]]) -> None:
        """Leave masks to the kernel, which chooses: take them out of the processors of some rows."""
        for kind in [kind for kind in kinds if issubclass(kind, TokenMask)]:
            for i, mask in zip(*kinds.pop(kind), strict=True):
                bits, row = mask.bits(self.raw.shape[1]), rows[i]
                self.masks[row] = self.masks[row] & bits if row in self.masks else bits

    def _fed_rows(self, requests: Sequence[int]) -> FedTokens | None:
        """Return the tokens that the host does not know of some requests; None: it knows all."""
        fed = self._fed
        if fed is None or len(requests) == len(self.requests):
            return fed
        places = [fed.places[i] for i in requests]
        late = [i for i, place in zip(requests, places, strict=True) if place >= 0]
        return FedTokens(fed.chosen, places, fed.tokens_of(late)) if late else None

    def _choose(self) -> None:
        """Choose a token for each row."""
        if self._by_kernel:
            self.tokens, state = choose_on_device(
                self.raw, self._at, self.processed, self.places, self.masks, self.drawing
            )
        else:
            self.tokens, state = self._choose_on_host()
        self._fetch = Fetch([self.tokens, state, *self._logprobs()])

    def _choose_on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int64 [R], and where there are none: bool [R]."""
        # The maximum of a row with a NaN is NaN; one of infinity leaves nothing to compare with.
        if list(self.places) == list(range(len(self.raw))):
            best, tokens = self.processed.max(dim=1)
        else:
            best, tokens = self.raw.max(dim=1)
            if self.places:
                changed = list(self.places)
                best[changed], tokens[changed] = self.processed.max(dim=1)
        if self.drawing:
            rows, params, numbers = zip(*self.drawing, strict=True)
            drawn = draw(self._changed_rows(rows), params, numbers)
            tokens = drawn if len(rows) == len(tokens) else tokens.index_copy(0, torch.tensor(rows), drawn)
        return tokens, ~torch.isfinite(best)

    def _wait(self) -> None:
        """Wait for the launched work, and read it."""
        tokens, state, *logprobs = self._fetch.wait()
        self.first_chosen += [int(token) for token in tokens]
        self.faults = [0] * len(tokens)
        if any(state):
            self.faults = [self._fault(row, int(found)) for row, found in enumerate(state)]
        self._read_logprobs(logprobs)

    @frees_memory()
    def runs(self) -> list[list[SampledToken]]:
        """Return the tokens of each request: the agreeing beginning of its draft, and one more.

        Waits for the device; to be called once.
        """
        self._wait()
        faults, chosen = self.faults, self.first_chosen
        if len(chosen) == len(self.requests) and not any(faults):
            logprobs = self.logprobs.get
            return [[SampledToken(token, logprobs(row))] for row, token in enumerate(chosen)]
        runs: list[list[SampledToken]] = []
        for i, start in enumerate(self.starts):
            if faults[start]:
                runs.append([SampledToken(faults[start])])
                continue
            run = [SampledToken(chosen[start], self.logprobs.get(start))]
            # A row broken after right tokens is broken in the next step, too, unless it is a mere guess.
            for row, guess in enumerate(self.drafts[i], start + 1):
                if chosen[row - 1] != guess or faults[row]:
                    break
                run.append(SampledToken(chosen[row], self.logprobs.get(row)))
            runs.append(run)
        return runs

    def _fault(self, row: int, state: int) -> int:
        """Return why no token of a row can be chosen; 0: one can."""
        if self._by_kernel:
            return FAULTS[state]
        if not state:
            return 0
        return NOTHING_LEFT if row in self.places and self.raw[row].max().isfinite() else NOT_A_NUMBER

    def _changed_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Return some rows on a CPU as the processors left them, not to be written to."""
        changed = [(j, self.places[row]) for j, row in enumerate(rows) if row in self.places]
        if len(changed) == len(rows):
            return _rows(self.processed, [place for _, place in changed])
        if not changed:
            return _rows(self.raw, rows)
        own = _copy(self.raw, rows)
        own[[j for j, _ in changed]] = self.processed[[place for _, place in changed]]
        return own

    def _logprobs(self) -> list[torch.Tensor]:
        """Return logprobs of the chosen and of named tokens, for `_read_logprobs`."""
        if not self.reported:
            return []
        rows = [row for row, _ in self.reported]
        own = self.tokens if len(rows) == len(self.tokens) else _copy(self.tokens, rows)
        most = max(params.logprobs or 0 for _, params in self.reported)
        named = [params.logprob_token_ids or () for _, params in self.reported]
        return _logprob_columns(_rows(self.raw, [self._at[row] for row in rows]), own, most, named)

    def _read_logprobs(self, columns: Sequence[list[float]]) -> None:
        if self.reported:
            tokens = [self.first_chosen[row] for row, _ in self.reported]
            named = [params.logprob_token_ids or () for _, params in self.reported]
            read = _read_columns(tokens, columns, named)
            for (row, params), own in zip(self.reported, read, strict=True):
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
