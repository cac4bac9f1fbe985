# SPDX-License-Identifier: Apache-2.0
"""Memory of tensors that is given back for a while; the tensors themselves stay."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from radixkv.model.loading.file_pages import address_ranges, release_mapped_pages


def release_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Give a CPU's pages back to the system; addresses stay, contents read as zeros. Linux only."""
    for start, end in address_ranges(tensors):
        release_mapped_pages(start, end - start)


class ReleasedTensors:
    """Tensors without memory until `restore`, which gives them other addresses.

    Args:
        keep: keep their contents in the CPU's memory meanwhile; False: they are lost.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._released = [
            (storage, storage.nbytes(), storage.cpu() if keep else None) for storage in storages.values()
        ]
        for storage, _, kept in self._released:
            if kept is not None and kept.data_ptr() == storage.data_ptr():
                continue  # it is in the CPU's memory already
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Give them memory again, and their contents if these were kept."""
        for storage, size, kept in self._released:
            if storage.nbytes() == size:
                continue
            storage.resize_(size)
            if kept is not None:
                storage.copy_(kept)
        self._released = []
