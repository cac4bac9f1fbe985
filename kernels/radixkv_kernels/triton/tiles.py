# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the Triton kernel, per GPU generation, head size and kind of work.

A row is a (token, query head of one KV group) pair. `short` tiles serve decodes, `long` tiles prompt chunks
and groups of requests that share a prefix. Deterministic mode uses the long tile for all work: tiles of
different heights use different tensor-core instructions, whose roundings may differ.

Chosen ahead of time: the largest that spill no registers (the table in docs/kernels.md). `python -m
benchmarks.tune` measures candidates on the GPU at hand and prints entries for this table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton

from radixkv_kernels.interface import BackendConfig
from radixkv_kernels.kv_cache import KVSpec
from radixkv_kernels.triton.head_shape import head_constants, heads_per_program, widest

#: KV positions per segment: the unit of splitting and sharing.
SEGMENT = 512
#: Unit in which items are cut where segments would be too few: a tile's keys.
MIN_SEGMENT = 64


@dataclass(frozen=True)
class Tile:
    """Rows and keys per tile, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


#: (padded head size, kind) -> tile of two-byte types, from compute capability 9.0 up.
HOPPER_TILES: dict[tuple[int, str], Tile] = {
    (64, "short"): Tile(16, 32, 4, 3),
    (64, "long"): Tile(128, 64, 8, 3),
    (128, "short"): Tile(16, 64, 4, 3),
    (128, "long"): Tile(128, 64, 8, 3),
    (256, "short"): Tile(16, 32, 4, 3),
    (256, "long"): Tile(32, 32, 8, 3),
    (512, "short"): Tile(16, 32, 8, 2),
    (512, "long"): Tile(32, 32, 8, 2),
}

#: The same for latents of more than 256 elements, where one copy of keys is their values, too. The long one
#: spills some registers, and was yet the fastest of seven on an H200.
HOPPER_LATENT_TILES = {"short": Tile(16, 64, 8, 2), "long": Tile(64, 64, 8, 2)}

#: The same below 9.0.
AMPERE_TILES: dict[tuple[int, str], Tile] = {
    (64, "short"): Tile(16, 32, 4, 3),
    (64, "long"): Tile(128, 32, 8, 2),
    (128, "short"): Tile(16, 64, 4, 2),
    (128, "long"): Tile(64, 64, 8, 2),
    (256, "short"): Tile(16, 32, 4, 2),
    (256, "long"): Tile(32, 16, 8, 2),
    (512, "short"): Tile(16, 16, 8, 2),
    (512, "long"): Tile(32, 16, 8, 2),
}

#: Stands for a compute capability on AMD GPUs.
CDNA = 0

#: The same on AMD's MI300. Programs of four waves may use twice the registers that eight can.
CDNA_TILES: dict[tuple[int, str], Tile] = AMPERE_TILES | {
    (128, "long"): Tile(64, 32, 4, 2),
    (256, "long"): Tile(32, 32, 4, 2),
}

#: Hopper's long tile of 64 < head size <= 128 where a feature needs more registers.
HOPPER_FEATURED_LONG = Tile(64, 64, 8, 3)
#: The same where segments are folded one by one, too.
HOPPER_FEATURED_SEGMENTS = Tile(32, 64, 8, 3)
#: The same where the cache is quantised; short tiles of more rows than the next one's then have as few keys,
#: unless a layer has a window or softcap, too: with few keys the assembler wants four programs a
#: multiprocessor there, and spills for it.
HOPPER_QUANTIZED_LONG = Tile(64, 32, 8, 3)
#: Hopper's short tile of 64 < head size <= 128 where the cache is quantised: two warps have half the
#: instructions a key of four with half the keys.
HOPPER_QUANTIZED_SHORT = Tile(16, 64, 2, 3)

#: Ampere's long tile of 64 < head size <= 128 where the cache is quantised.
AMPERE_QUANTIZED_LONG = Tile(32, 64, 8, 2)

#: Ampere's short tile of 128 < head size < 256.
AMPERE_PADDED_SHORT = Tile(16, 32, 4, 2)


def has_latent_tiles(spec: KVSpec, element_bytes: int, capability: int, *, by_segment: bool) -> bool:
    """Return True if `HOPPER_LATENT_TILES` are for this cache; sums of two segments would not fit.

    Args:
        element_bytes, capability, by_segment: see `choose_tile` and `launch_tile`.
    """
    shared = bool(head_constants(spec)["REUSE"])
    return shared and spec.head_size > 256 and element_bytes == 2 and capability >= 90 and not by_segment


def choose_tile(
    head_size: int,
    group_size: int,
    kind: str,
    element_bytes: int,
    capability: int = 90,
    *,
    latents: bool = False,
) -> Tile:
    """The tile that work is cut for.

    Args:
        head_size: padded up to a power of two from 64 to 512, for the look-up.
        group_size: query heads of a program; rows grow to hold at least one token's whole group.
        kind: `short` or `long`.
        element_bytes: of queries. Four-byte types use small tiles: their products run outside tensor cores.
        capability: compute capability x 10, or `CDNA`.
        latents: see `has_latent_tiles`.
    """
    padded = min(512, max(64, 1 << (head_size - 1).bit_length()))
    if element_bytes == 4:
        tile = Tile(16, 32, 8, 2) if kind == "short" or padded > 128 else Tile(32, 16, 8, 2)
        if padded > 256:
            tile = replace(tile, keys=16)
    elif latents:
        tile = HOPPER_LATENT_TILES[kind]
    else:
        tiles = HOPPER_TILES if capability >= 90 else CDNA_TILES if capability == CDNA else AMPERE_TILES
        tile = tiles[padded, kind]
    rows = tile.rows
    while rows < group_size:
        rows *= 2
    return Tile(rows, tile.keys, tile.warps, tile.stages)


def launch_tile(
    planned: Tile,
    head_size: int,
    element_bytes: int,
    capability: int,
    *,
    group_size: int,
    block_size: int,
    featured: bool,
    quantized: bool,
    by_segment: bool,
) -> Tile:
    """The tile a layer runs with: the planned one, or one of fewer rows (several programs then share an
    item), which still hold one token's group.

    Args:
        group_size: query heads of a program.
        featured: the layer has a window or softcap.
        quantized: its cache is.
        by_segment: segments are folded one by one (deterministic mode).
    """
    if element_bytes != 2:
        return planned
    padded = head_size & (head_size - 1) != 0
    few_keys = quantized and not (featured and planned.rows < HOPPER_QUANTIZED_LONG.rows)
    featured = featured or quantized or padded or block_size > 16
    if capability >= 90 and 64 < head_size <= 128 and (featured or by_segment):
        lower = HOPPER_FEATURED_LONG
        if featured and by_segment and group_size <= HOPPER_FEATURED_SEGMENTS.rows:
            lower = HOPPER_FEATURED_SEGMENTS
        elif quantized:
            lower = HOPPER_QUANTIZED_LONG
        if planned.rows > lower.rows >= group_size:
            return lower
        if quantized and planned.rows == HOPPER_QUANTIZED_SHORT.rows:
            return HOPPER_QUANTIZED_SHORT
        return replace(planned, keys=HOPPER_QUANTIZED_LONG.keys) if few_keys else planned
    if CDNA < capability < 90 and 64 < head_size <= 128 and quantized:
        lower = AMPERE_QUANTIZED_LONG
        return lower if planned.rows > lower.rows >= group_size else planned
    if capability < 90 and 128 < head_size < 256 and planned.rows == AMPERE_PADDED_SHORT.rows:
        return AMPERE_PADDED_SHORT
    return planned


def bucket(n: int) -> int:
    """Grid sizes: 0, then powers of two and the halfway points between them. At most a third is idle
    programs."""
    if n <= 1:
        return n
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


@functools.cache
def capability_of(device: torch.device) -> int:
    """Compute capability x 10; Hopper's for the interpreter, `CDNA` for AMD."""
    if device.type != "cuda":
        return 90
    if torch.version.hip is not None:
        return CDNA
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; Hopper's for the interpreter."""
    if device.type != "cuda":
        return 227 << 10
    utils = triton.runtime.driver.active.utils
    return int(utils.get_device_properties(device.index or 0)["max_shared_mem"])


class Tiling:
    """The tiles of one backend.

    Attributes:
        segment: KV positions per segment.
        unit: KV positions that items count in. Deterministic mode has segments of one length; otherwise a
            step of little work has shorter ones.
        group: query heads of a program, all of one KV head.
        latents: see `has_latent_tiles`.
        short, long: tiles that work is cut for.
    """

    segment = SEGMENT

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.unit = self.segment if config.deterministic else min(self.segment, MIN_SEGMENT)
        self.capability = capability_of(config.spec.device)
        self.latents = has_latent_tiles(
            *(config.spec, config.compute_dtype.itemsize, self.capability), by_segment=config.deterministic
        )
        self.group = heads_per_program(widest(config.spec), config.group_size, latents=self.latents)
        self.long = self.choose("long")
        self.short = self.long if config.deterministic else self.choose("short")

    def choose(self, kind: str) -> Tile:
        """The tile that work of a kind is cut for."""
        config = self.config
        element = config.compute_dtype.itemsize
        return choose_tile(
            widest(config.spec), self.group, kind, element, self.capability, latents=self.latents
        )

    def launched(self, planned: Tile, featured: bool) -> Tile:
        """The tile that a layer runs with; `featured`: see `launch_tile`."""
        spec, element = self.config.spec, self.config.compute_dtype.itemsize
        return launch_tile(
            planned,
            widest(spec),
            element,
            self.capability,
            group_size=self.group,
            block_size=spec.block_size,
            featured=featured,
            quantized=spec.quantization is not None,
            by_segment=self.config.deterministic,
        )
