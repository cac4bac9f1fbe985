# SPDX-License-Identifier: Apache-2.0
"""Releasing mapped weights: nothing is lost, and nothing that was written is released."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from radixkv.model.loading.file_pages import address_ranges, release_file_pages

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps")

PAGES = 64


@pytest.fixture
def expected() -> torch.Tensor:
    return torch.arange(PAGES * mmap.PAGESIZE // 4, dtype=torch.int32)


def mapped(path: Path, expected: torch.Tensor) -> torch.Tensor:
    """The file's contents as a tensor over a private mapping, every page read."""
    path.write_bytes(expected.numpy().tobytes())
    tensor = torch.from_file(str(path), shared=False, size=expected.numel(), dtype=torch.int32)
    assert torch.equal(tensor, expected)
    return tensor


def resident(path: Path) -> int:
    """Bytes of the file that are resident in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_released_pages_come_back_from_the_file(tmp_path: Path, expected: torch.Tensor) -> None:
    path = tmp_path / "model.safetensors"
    weight = mapped(path, expected)
    assert resident(path) == PAGES * mmap.PAGESIZE
    assert release_file_pages(address_ranges([weight])) == PAGES * mmap.PAGESIZE
    assert resident(path) == 0
    assert torch.equal(weight, expected)


def test_changed_weights_are_kept(tmp_path: Path, expected: torch.Tensor) -> None:
    weight = mapped(tmp_path / "model.safetensors", expected)
    weight[7] = -1
    assert release_file_pages(address_ranges([weight])) == 0
    assert weight[7] == -1


def test_memory_that_is_no_weight_file_is_kept(tmp_path: Path, expected: torch.Tensor) -> None:
    own = expected.clone()
    other = mapped(tmp_path / "other.bin", expected)
    assert release_file_pages(address_ranges([own, other])) == 0
    assert torch.equal(own, expected)


def test_ranges_that_are_gone_are_ignored() -> None:
    assert release_file_pages([(0, mmap.PAGESIZE), (sys.maxsize // 2, sys.maxsize // 2 + 1)]) == 0


def test_only_the_tensor_is_released_not_its_neighbour(tmp_path: Path, expected: torch.Tensor) -> None:
    whole = mapped(tmp_path / "model.safetensors", expected)
    first, last = address_ranges([whole])[0]
    half = first + PAGES // 2 * mmap.PAGESIZE + 100
    assert release_file_pages([(half, last)]) == (PAGES // 2 - 1) * mmap.PAGESIZE
    assert resident(tmp_path / "model.safetensors") == (PAGES // 2 + 1) * mmap.PAGESIZE
    assert torch.equal(whole, expected)


def test_written_memory_behind_a_file_does_not_count(tmp_path: Path, expected: torch.Tensor) -> None:
    """Mappings are laid out downwards: some of these files end where memory of the process begins."""
    memory, weights = [], []
    for number in range(16):
        memory.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        memory[-1].write(bytes([1]) * (1 << 20))
        weights.append(mapped(tmp_path / f"{number}.safetensors", expected))
    assert release_file_pages(address_ranges(weights)) == len(weights) * PAGES * mmap.PAGESIZE
