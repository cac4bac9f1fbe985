# SPDX-License-Identifier: Apache-2.0
"""The attention interface: one plan per step, one write and one attend per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv_kernels.kv_cache import COMPUTE_DTYPES, KVSpec, PagedKV
from radixkv_kernels.norm_rotary import LatentRotation, Rotation

#: Block tables of a batch: R int32 arrays, or one int32 [R, W]; entries past a request's last block are
#: ignored.
BlockTables = Sequence[np.ndarray] | np.ndarray

_NO_BLOCKS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class BackendConfig:
    """Parameters that a backend is built for.

    Attributes:
        num_query_heads: a multiple of `spec.num_kv_heads`.
        spec: the cache it reads.
        compute_dtype: of queries, new keys and values, and outputs; on a CPU they may also be float32.
        deterministic: a row's result is bit-identical whatever the batch, chunking, sharing or placement.
        share_prefixes: attend the segments that requests share once per group, where that pays.
        max_num_tokens, max_num_seqs: most query rows and requests of a step.
        max_model_len: longest context.

    Raises:
        ValueError: values that do not fit together.
    """

    num_query_heads: int
    spec: KVSpec
    compute_dtype: torch.dtype
    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int
    deterministic: bool = False
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        if self.num_query_heads < 1 or self.num_query_heads % self.spec.num_kv_heads:
            raise ValueError(
                f"num_query_heads ({self.num_query_heads}) must be a multiple of "
                f"num_kv_heads ({self.spec.num_kv_heads})"
            )
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(f"compute_dtype must be float32, bfloat16 or float16, got {self.compute_dtype}")
        if self.spec.quantization is None and self.spec.dtype != self.compute_dtype:
            raise ValueError(
                f"an unquantised cache holds the compute dtype: {self.spec.dtype} is not {self.compute_dtype}"
            )
        for name in ("max_num_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.spec.num_kv_heads


@dataclass(slots=True)
class Scoring:
    """Parameters of the logits of queries and keys; see `AttentionBackend.attend`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ahead:
    """Positions after their own that rows of a step see: those of an image whose tokens see each other.

    Attributes:
        counts: int32 [T], how many of them, all within the context of the row's request.
        in_windows_only: in layers with a window only (Gemma 4); the others are causal.
    """

    counts: np.ndarray
    in_windows_only: bool = False

    def of(self, rows: np.ndarray) -> Ahead:
        """Return that of some rows of the step."""
        return Ahead(self.counts[rows], self.in_windows_only)


class AttentionPlan:
    """A step's work, made by `AttentionBackend.plan` and read by `attend` in every layer.

    Attributes:
        ahead: what rows see after their own position; None: nothing.
        query_starts: int32 [R + 1].
        context_lengths: int32 [R], total KV length of each request, this step's tokens included.
        tables: int32, all block tables one after another; request r's begins at `table_starts[r]`.
        token_positions: int32 [num_tokens], the absolute position of each query token.
        num_tokens: query rows in the batch, `query_starts[-1]`.
    """

    def __init__(
        self,
        config: BackendConfig,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> None:
        self.query_starts = np.asarray(query_starts, dtype=np.int32)
        self.context_lengths = np.asarray(context_lengths, dtype=np.int32)
        num_requests = len(self.context_lengths)
        if len(self.query_starts) != num_requests + 1 or len(tables) != num_requests:
            raise ValueError(
                f"{num_requests} context lengths need {num_requests + 1} query starts "
                f"and as many block tables, got {len(self.query_starts)} and {len(tables)}"
            )
        self.query_lengths = np.diff(self.query_starts)
        if num_requests and (
            self.query_starts[0] != 0
            or self.query_lengths.min() < 0
            or (self.query_lengths > self.context_lengths).any()
        ):
            raise ValueError("query_starts must start at 0, never fall, and stay within the context lengths")
        self.token_positions = self.positions()
        self.ahead = ahead
        if ahead is not None:
            ends = np.repeat(self.context_lengths, self.query_lengths)
            if len(ahead.counts) != self.num_tokens or (self.token_positions + ahead.counts >= ends).any():
                raise ValueError("rows must see as far as their request's context, and each say how far")
        size = config.spec.block_size
        self._block_counts = (self.context_lengths + (size - 1)) // size
        if isinstance(tables, np.ndarray):
            widths = np.full(num_requests, tables.shape[1])
            self.tables = np.ascontiguousarray(tables, dtype=np.int32).reshape(-1)
        else:
            widths = np.fromiter(map(len, tables), dtype=np.int64, count=num_requests)
            self.tables = np.concatenate([_NO_BLOCKS, *tables], dtype=np.int32, casting="same_kind")
        self.table_starts = np.cumsum(widths) - widths
        short = np.flatnonzero(widths < self._block_counts)
        if len(short):
            r = int(short[0])
            raise ValueError(
                f"block table {r} holds {widths[r]} blocks, its context needs {self._block_counts[r]}"
            )

    @property
    def block_tables(self) -> list[np.ndarray]:
        """Per request, the blocks its context needs: views of `tables`."""
        starts, counts = self.table_starts.tolist(), self._block_counts.tolist()
        return [self.tables[at : at + n] for at, n in zip(starts, counts, strict=True)]

    def positions(self) -> np.ndarray:
        """int32 [num_tokens], the absolute position of each query token."""
        offsets = np.repeat(self.context_lengths - self.query_starts[1:], self.query_lengths)
        return offsets + np.arange(self.num_tokens, dtype=np.int32)

    def last_seen(self, window: int | None) -> np.ndarray:
        """int32 [num_tokens], the last position that each row sees in layers with this window."""
        positions = self.token_positions
        return positions + self.ahead.counts if self.ahead and self.sees_ahead(window) else positions

    def sees_ahead(self, window: int | None) -> bool:
        """Return True if rows may see positions after their own in layers with this window."""
        return self.ahead is not None and not (self.ahead.in_windows_only and window is None)

    @property
    def num_requests(self) -> int:
        return len(self.context_lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1]) if len(self.query_starts) else 0

    def __repr__(self) -> str:
        longest = int(self.context_lengths.max()) if self.num_requests else 0
        kind = type(self).__name__
        return f"{kind}({self.num_requests} requests, {self.num_tokens} tokens, longest {longest})"


class AttentionBackend(ABC):
    """Paged attention of one model on one device. Not thread-safe: scratch buffers are reused."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config

    @property
    def scratch_bytes(self) -> int:
        """Most bytes that a call of `attend` allocates besides its output."""
        return 0

    @abstractmethod
    def plan(
        self,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> AttentionPlan:
        """Lay out one step's work; reused by all layers.

        Args:
            query_starts: int32 [R + 1]; query rows of request r are `query_starts[r]:query_starts[r + 1]`.
            context_lengths: int32 [R]; total KV length of each request, the new tokens included. Query j of
                request r is at absolute position `context_lengths[r] - query_length + j`.
            block_tables: R int32 arrays (views; may be longer than needed) or int32 [R, W].
            ahead: what rows see after their own position; None: nothing.

        Raises:
            ValueError: lengths and tables do not fit together.
        """

    @abstractmethod
    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Store new keys and values, quantising on the way where the cache is quantised.

        Args:
            key, value: `[T, Hkv, D]` and `[T, Hkv, V]`, compute dtype, any strides with a contiguous last
                dimension. `value` is not read where values are part of the keys.
            slots: int64 [N], `block * block_size + offset`; -1 skips the entry.
            rows: int64 [N] or None. None: row i goes to `slots[i]` (N == T). Otherwise row `rows[i]` goes to
                `slots[i]`: a row may go to several slots or to none.
        """

    def rotate_and_write(
        self,
        kv: PagedKV,
        layer: int,
        merged: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, and `write` keys and values.

        Args:
            merged: `[T, width]`, queries, keys and values of one size as one product gives them, see
                `Rotation`.
            slots: int64 [N]; without `rows`, N may be less than T: the rest is padding.

        Returns:
            The queries, `[T, Hq, D]`.
        """
        spec = self.config.spec
        query, key, value = rotation.apply(
            merged, self.config.num_query_heads, spec.num_kv_heads, spec.head_size
        )
        if rows is None:
            key, value = key[: len(slots)], value[: len(slots)]
        self.write(kv, layer, key, value, slots, rows)
        return query

    def write_latents(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        folded: torch.Tensor,
        latents: torch.Tensor,
        rotation: LatentRotation,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Rotate queries of latents, norm and rotate latents, and `write` these as keys.

        Args:
            query: `[T, Hq, plain + rest]`; latents: `[T, latent + rest]`, see `LatentRotation`.
            folded: `[T, Hq, D]`, whose elements from `latent` on are written; all are where queries grow.
            slots, rows: as in `rotate_and_write`.
        """
        spec, start = self.config.spec, rotation.latent
        if rotation.growth is not None:
            folded[..., :start] = rotation.growth.apply(folded[..., :start])
        folded[..., start : start + rotation.rest] = rotation.turned(query)
        folded[..., start + rotation.rest :] = 0
        key = rotation.key(latents, spec.head_size)
        if rows is None:
            key = key[: len(slots)]
        self.write(kv, layer, key, key[..., : spec.value_size], slots, rows)

    def attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of every query row over its request's cached keys and values, to its own position.

        Rows of `plan.ahead` also see some positions after their own.

        Args:
            query: `[T, Hq, D]`, compute dtype. T may exceed the plan's tokens: the rest is padding.
            plan: of this step; its tokens' keys and values have been written.
            scale: factor on the dot products.
            window: number of visible positions, the query's own included and those after it not; None: all.
            softcap: logits become `softcap * tanh(logits / softcap)`; None: off.
            sinks: `[Hq]`, a logit per head that joins the softmax's denominator (GPT-OSS).
            out: `[T, Hq, V]` to write into; padding rows of it are left untouched.

        Returns:
            `[T, Hq, V]`, compute dtype; `out` where given. Padding rows of a new tensor are zero.
        """
        if out is None:
            shape = (*query.shape[:2], self.config.spec.value_size)
            out = torch.empty(shape, dtype=query.dtype, device=query.device)
            if plan.num_tokens < query.shape[0]:
                out[plan.num_tokens :] = 0
        if plan.num_tokens:
            self._attend(kv, layer, query, plan, Scoring(scale, window, softcap, sinks), out)
        return out

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Compute `attend` of a plan with tokens, into `out`. A backend overrides this or `attend`."""
        raise NotImplementedError

    def pad(  # noqa: B027
        self, plan: AttentionPlan, windows: Collection[int | None], rows: int, *, every_kernel: bool
    ) -> None:
        """Launch for a plan what steps of up to `rows` rows need, so that these have few launch keys.

        Args:
            every_kernel: also what this plan has no work for.
        """

    def stage(self, plan: AttentionPlan, windows: Collection[int | None]) -> None:  # noqa: B027
        """Bring a plan to where recorded launches (CUDA graphs) read it, for layers with these windows.

        Nothing to do for a backend that reads plans on the host.
        """

    def launch_key(self, plan: AttentionPlan, windows: Collection[int | None]) -> Hashable:
        """Return the values that a layer's launches depend on besides their arguments and `stage`'s output.

        Launches recorded with one plan may be replayed with another, staged, that has an equal key.
        """
        return None

    @abstractmethod
    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first slots of blocks, in all layers: K, V and scales.

        Args:
            copies: (source block, target block, number of slots). Sources are read before any target of the
                same call is written, and no block may be the target of two copies that overlap.
        """
