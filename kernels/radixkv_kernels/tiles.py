"""Tile shapes of the Triton kernel, per head size and kind of work.

A row is a (token, query head of one KV group) pair. `short` tiles serve decodes, `long` tiles prompt chunks
and groups of requests that share a prefix. Deterministic mode uses the long tile for all work: tiles of
different heights use different tensor-core instructions, whose roundings may differ.

Chosen ahead of time for no register spills and for occupancy on sm_80 and sm_90 (the table in
docs/kernels.md). `python -m benchmarks.tune` measures candidates on the GPU at hand and prints entries for
this table.
"""

from __future__ import annotations

from dataclasses import dataclass

#: KV positions per segment: the unit of splitting and sharing.
SEGMENT = 512


@dataclass(frozen=True)
class Tile:
    """Rows and keys per tile, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


#: (padded head size, "short" or "long") -> tile, for two-byte types; see `choose_tile` for the others.
TILES: dict[tuple[int, str], Tile] = {
    (16, "short"): Tile(16, 64, 4, 3),
    (16, "long"): Tile(64, 64, 4, 3),
    (32, "short"): Tile(16, 64, 4, 3),
    (32, "long"): Tile(64, 64, 4, 3),
    (64, "short"): Tile(16, 64, 4, 3),
    (64, "long"): Tile(128, 64, 8, 3),
    (128, "short"): Tile(16, 64, 4, 3),
    (128, "long"): Tile(64, 64, 8, 2),
    (256, "short"): Tile(16, 32, 4, 2),
    (256, "long"): Tile(64, 32, 8, 2),
}


def choose_tile(head_size: int, group_size: int, kind: str, element_bytes: int) -> Tile:
    """The tile for a head size (padded up to a power of two), query heads per KV head, and kind of work.

    Rows grow so that a tile holds at least one token's whole group. Four-byte types take half the rows and
    one stage less: their products run outside the fast tensor-core paths and need twice the memory.
    """
    padded = max(16, 1 << (head_size - 1).bit_length())
    tile = TILES[padded, kind]
    rows, keys, stages = tile.rows, tile.keys, tile.stages
    if element_bytes == 4:
        rows, keys, stages = max(16, rows // 2), max(16, keys // 2), 2
    while rows < group_size:
        rows *= 2
    return Tile(rows, keys, tile.warps, stages)
