# SPDX-License-Identifier: Apache-2.0
"""Find the fastest tiles on this GPU, and print entries for radixkv_kernels/triton/tiles.py.

    python -m benchmarks.tune [--head-size 128 ...] [--heads 32:8] [--context 8192] [--list]

For each head size, short tiles are timed on 64 decodes and long tiles on one causal prompt, both of
`--context` tokens, bfloat16. Candidates that do not compile, need more shared memory than there is, or give
a wrong result are left out, with the reason. `--list` prints the candidates and times nothing; it needs no
GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch

from benchmarks.paged_bench import Bench, Sizes, milliseconds
from radixkv_kernels.interface import BackendConfig
from radixkv_kernels.triton.backend import TritonBackend
from radixkv_kernels.triton.tiles import Tile, Tiling


def candidates(kind: str, head_size: int) -> list[Tile]:
    """Tiles worth trying: accumulators of a tile (rows x padded head size) must have a chance to fit."""
    padded = max(64, 1 << (head_size - 1).bit_length())
    rows = (16, 32) if kind == "short" else (32, 64, 128)
    found = []
    for r, keys, warps, stages in itertools.product(rows, (16, 32, 64, 128), (2, 4, 8), (2, 3, 4)):
        elements_per_thread = r * padded / (32 * warps)
        # Two float32 accumulators and the scores share 255 registers; too few elements leave warps idle.
        if 2 * elements_per_thread + r * keys / (32 * warps) > 200 or elements_per_thread < 4:
            continue
        if 2 * stages * keys * padded * 2 > 200 << 10:
            continue
        found.append(Tile(r, keys, warps, stages))
    return found


def make_bench(sizes: Sizes, kind: str, heads: tuple[int, int], head_size: int, context: int) -> Bench:
    if kind == "short":
        return Bench(sizes, [context] * 64, heads=(*heads, head_size), share_prefixes=False)
    return Bench(sizes, [context], tokens=[context], heads=(*heads, head_size))


class OneTile(Tiling):
    """The same tile for all work."""

    def __init__(self, config: BackendConfig, tile: Tile) -> None:
        self.tile = tile
        super().__init__(config)

    def choose(self, kind: str) -> Tile:
        return self.tile

    def launched(self, planned: Tile, featured: bool) -> Tile:
        return planned


def time_tile(bench: Bench, kind: str, tile: Tile, sizes: Sizes, expected: torch.Tensor) -> float:
    """Milliseconds with a tile in place of the shipped one. Raises where it fails or differs."""
    config = bench.backend.config
    if tile.rows < config.group_size:
        raise ValueError("fewer rows than query heads per KV head")
    backend = bench.backend
    try:
        bench.backend = TritonBackend(config, OneTile(config, tile))
        run = bench.attend()
        error = (run().float() - expected).abs().max().item()
        if not error <= 2e-2:
            raise ValueError(f"wrong by {error:.1e}")
        return milliseconds({kind: run}, sizes)[kind]
    finally:
        bench.backend = backend


def tune(
    kind: str, heads: tuple[int, int], head_size: int, context: int, sizes: Sizes
) -> list[tuple[float, Tile]]:
    bench = make_bench(sizes, kind, heads, head_size, context)
    expected = bench.attend()().float().clone()
    timed = []
    for tile in candidates(kind, head_size):
        try:
            timed.append((time_tile(bench, kind, tile, sizes, expected), tile))
        except Exception as e:
            # A candidate may fail in many ways (compiler, resources, launch); the next one is independent.
            print(f"    left out {tile}: {str(e).splitlines()[0] if str(e) else type(e).__name__}")
    return sorted(timed, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-size", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--heads", default="32:8", help="query heads:KV heads")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--list", action="store_true", help="print the candidates only")
    args = parser.parse_args()
    query_heads, kv_heads = map(int, args.heads.split(":"))
    if not args.list and not torch.cuda.is_available():
        sys.exit("no CUDA device; --list prints the candidates without one")
    for head_size, kind in itertools.product(args.head_size, ("short", "long")):
        print(f"head size {head_size}, {kind}")
        if args.list:
            for tile in candidates(kind, head_size):
                print(f"    {tile}")
            continue
        sizes = Sizes(False, torch.device("cuda"))
        ranked = tune(kind, (query_heads, kv_heads), head_size, args.context, sizes)
        for ms, tile in ranked[:5]:
            print(f"    {ms:8.3f} ms  {tile}")
        if ranked:
            tile = ranked[0][1]
            padded = max(64, 1 << (head_size - 1).bit_length())
            print(f'    ({padded}, "{kind}"): Tile({tile.rows}, {tile.keys}, {tile.warps}, {tile.stages}),')


if __name__ == "__main__":
    main()
