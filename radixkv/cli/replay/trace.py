# SPDX-License-Identifier: Apache-2.0
"""Trace: a recorded sequence of prompts, reduced to the identity of their blocks.

A prompt is a path of block ids. Equal ids mean equal prefixes *up to the end of that block*, so every id
has exactly one parent and all prompts of a trace form one trie. That is all a prefix cache can tell
apart, and it keeps private text out of the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.errors import RadixKVError

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class TraceError(RadixKVError, ValueError):
    """A trace can't be read or makes no sense; the message names the file, the line and the remedy."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in file order. Request `r` asks for `block_ids[offsets[r]:offsets[r + 1]]`.

    Attributes:
        name: short name, from the file's.
        block_size: tokens per block.
        offsets: int64 [requests + 1].
        block_ids: int64 [blocks], dense: 0 <= id < num_unique.
        parents: int64 [num_unique], the id before each id on its path; -1 for a first block.
        input_lengths: int64 [requests], prompt tokens.
        output_lengths: int64 [requests], generated tokens; 0 where the trace does not say.
        arrivals: float64 [requests], seconds since the start of the recording.
    """

    name: str
    block_size: int
    offsets: Int64Array
    block_ids: Int64Array
    parents: Int64Array
    input_lengths: Int64Array
    output_lengths: Int64Array
    arrivals: FloatArray

    @property
    def num_requests(self) -> int:
        return len(self.input_lengths)

    @property
    def num_blocks(self) -> int:
        """Blocks asked for, over all requests."""
        return len(self.block_ids)

    @property
    def num_unique(self) -> int:
        """Number of distinct blocks: the final size of an unlimited cache."""
        return len(self.parents)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens, over all requests."""
        return int(self.input_lengths.sum())

    @property
    def longest_request(self) -> int:
        """Blocks of the longest prompt."""
        return int(np.diff(self.offsets).max(initial=0))

    def path(self, request: int) -> Int64Array:
        """Block ids of one request (a view)."""
        return self.block_ids[self.offsets[request] : self.offsets[request + 1]]

    def first(self, requests: int) -> Trace:
        """The first requests alone; ids keep their numbers."""
        end = self.offsets[: requests + 1][-1]
        return replace(
            self,
            offsets=self.offsets[: requests + 1],
            block_ids=self.block_ids[:end],
            input_lengths=self.input_lengths[:requests],
            output_lengths=self.output_lengths[:requests],
            arrivals=self.arrivals[:requests],
        )

    def hit_tokens(self, hit_blocks: npt.ArrayLike) -> int:
        """Prompt tokens inside the first `hit_blocks[r]` blocks of each request, the last block's padding
        not counted: sum of min(hits * block_size, input length)."""
        return int(np.minimum(np.asarray(hit_blocks) * self.block_size, self.input_lengths).sum())

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}: {self.num_requests} requests, {self.num_blocks} blocks of "
            f"{self.block_size} tokens, {self.num_unique} distinct)"
        )

    def check(self) -> None:
        """Assert that the arrays fit together and form a trie. O(blocks)."""
        assert len(self.offsets) == self.num_requests + 1
        assert self.offsets[0] == 0
        assert self.offsets[-1] == self.num_blocks
        assert (np.diff(self.offsets) >= 0).all()
        assert np.array_equal(self.parents[self.block_ids], _previous_ids(self.offsets, self.block_ids))


def _previous_ids(offsets: Int64Array, ids: Int64Array) -> Int64Array:
    """For each position the id before it in its request, or -1."""
    previous = np.empty_like(ids)
    previous[1:] = ids[:-1]
    starts = offsets[:-1][np.diff(offsets) > 0]
    previous[starts] = -1
    return previous


def infer_block_size(lengths: Sequence[int], counts: Sequence[int]) -> int | None:
    """Find the block size that explains how many blocks each prompt has, or None.

    Traces count either every started block (`ceil(length / size)`) or full blocks only (`floor`). The
    size must explain all requests one way; of several, a power of two is preferred, then the largest.
    """
    length = np.asarray(lengths, dtype=np.int64)
    count = np.asarray(counts, dtype=np.int64)
    if not count.any():
        return None
    candidates: set[int] = set()
    # ceil: length / count <= size < length / (count - 1)
    several = count > 1
    low = int(np.max(-(-length[count > 0] // count[count > 0])))
    high = int(np.min((length[several] - 1) // (count[several] - 1))) if several.any() else low
    if (count > 0).all():
        candidates.update(_best_in(low, high))
    # floor: length / (count + 1) < size <= length / count
    low = int(np.max(length // (count + 1))) + 1
    high = int(np.min(length[count > 0] // count[count > 0]))
    candidates.update(_best_in(low, high))
    powers = [size for size in candidates if size & (size - 1) == 0]
    return max(powers or candidates, default=None)


def _best_in(low: int, high: int) -> list[int]:
    """The largest power of two in [low, high], and `high` itself; empty if the range is."""
    if high < max(low, 1):
        return []
    power = 1 << (high.bit_length() - 1)
    return [power, high] if power >= low else [high]


class TraceBuilder:
    """Collects requests and turns them into a `Trace`.

    Args:
        name: the trace's short name, also the start of error messages.
        ids_are_prefixes: True: an id names the whole prefix up to its block's end (Mooncake's traces),
            so an id with two parents is an error. False: an id names the content of one block only
            (Qwen's traces), and prefixes are told apart here.
    """

    def __init__(self, name: str, *, ids_are_prefixes: bool = True) -> None:
        self.name = name
        self.ids_are_prefixes = ids_are_prefixes
        self._lines: list[int] = []
        self._paths: list[Sequence[Hashable]] = []
        self._input: list[int] = []
        self._output: list[int] = []
        self._arrivals: list[float] = []

    def add(
        self,
        path: Sequence[Hashable],
        *,
        input_length: int,
        output_length: int = 0,
        arrival: float = 0.0,
        line: int = 0,
    ) -> None:
        """Append one request; `line` is where it stands in its file, for error messages."""
        self._paths.append(path)
        self._input.append(input_length)
        self._output.append(output_length)
        self._arrivals.append(arrival)
        self._lines.append(line)

    def __len__(self) -> int:
        return len(self._paths)

    def build(self, block_size: int | None = None) -> Trace:
        """Number the blocks densely, check that they form a trie, infer the block size if not given.

        Raises:
            TraceError: no request; a block id with two parents; a block size that can't be inferred or
                does not fit the lengths.
        """
        if not self._paths:
            raise TraceError(f"{self.name}: no request in the file; a trace needs at least one line")
        counts = [len(path) for path in self._paths]
        if block_size is None:
            block_size = infer_block_size(self._input, counts)
            if block_size is None:
                raise TraceError(
                    f"{self.name}: the block size can't be told from the input lengths and the numbers "
                    "of hash_ids (no size gives them all); pass --block-size, or check the lengths"
                )
        else:
            self._check_counts(block_size)
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        ids = self._number_prefixes() if not self.ids_are_prefixes else self._number_ids(int(offsets[-1]))
        num_unique = int(ids.max(initial=-1)) + 1
        previous = _previous_ids(offsets, ids)
        parents = np.full(num_unique, -1, dtype=np.int64)
        parents[ids] = previous
        wrong = np.flatnonzero(parents[ids] != previous)
        if len(wrong):
            self._report_two_parents(offsets, ids, int(wrong[0]))
        return Trace(
            name=self.name,
            block_size=block_size,
            offsets=offsets,
            block_ids=ids,
            parents=parents,
            input_lengths=np.asarray(self._input, dtype=np.int64),
            output_lengths=np.asarray(self._output, dtype=np.int64),
            arrivals=np.asarray(self._arrivals, dtype=np.float64),
        )

    def _check_counts(self, block_size: int) -> None:
        for path, length, line in zip(self._paths, self._input, self._lines, strict=True):
            if len(path) not in (length // block_size, -(-length // block_size)):
                raise TraceError(
                    f"{self.name}, line {line}: {len(path)} hash_ids do not fit an input_length of {length} "
                    f"with blocks of {block_size} tokens (expected {length // block_size} or "
                    f"{-(-length // block_size)}); is --block-size right?"
                )

    def _number_ids(self, total: int) -> Int64Array:
        """Dense numbers for ids that name prefixes; ids may be any hashable (ints, hex strings)."""
        numbers: dict[Hashable, int] = {}
        setdefault = numbers.setdefault
        flat: Iterable[Hashable] = (block for path in self._paths for block in path)
        return np.fromiter((setdefault(block, len(numbers)) for block in flat), dtype=np.int64, count=total)

    def _number_prefixes(self) -> Int64Array:
        """Dense numbers for (parent, content) pairs."""
        numbers: dict[Any, int] = {}
        out: list[int] = []
        for path in self._paths:
            parent = -1
            for content in path:
                parent = numbers.setdefault((parent, content), len(numbers))
                out.append(parent)
        return np.asarray(out, dtype=np.int64)

    def _report_two_parents(self, offsets: Int64Array, ids: Int64Array, position: int) -> None:
        """Name both lines where the id's parents disagree."""
        positions = np.flatnonzero(ids == ids[position])
        previous = _previous_ids(offsets, ids)[positions]
        first = int(positions[0])
        second = int(positions[np.flatnonzero(previous != previous[0])[0]])
        places = []
        for place in (first, second):
            request = int(np.searchsorted(offsets, place, side="right")) - 1
            index = place - int(offsets[request])
            path = self._paths[request]
            before = f"after block {path[index - 1]!r}" if index else "as the first block"
            places.append((self._lines[request], before, path[index]))
        raise TraceError(
            f"{self.name}, line {places[1][0]}: block id {places[1][2]!r} stands {places[1][1]}, but "
            f"{places[0][1]} in line {places[0][0]}. An id must name its whole prefix, so it has one "
            "parent only. If the ids of this trace name the content of single blocks, pass "
            "--block-ids content."
        )
