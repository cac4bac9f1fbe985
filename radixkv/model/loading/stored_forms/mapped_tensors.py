# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model folder, mapped into memory: pages are read when their numbers are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from radixkv.errors import ModelLoadError


class MappedTensors(Mapping[str, Tensor]):
    """A folder's tensors by their names in its files.

    Args:
        paths: the safetensors files.

    Attributes:
        metadata: texts of the files' headers by their names.

    Raises:
        ModelLoadError: a file can't be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{path} can't be read: {error}. Fetch it again.") from error
            self.metadata |= file.metadata() or {}
            self._files |= dict.fromkeys(file.keys(), file)
        self._read: dict[str, Tensor] = {}
        self._by_module: dict[str, list[str]] = {}
        for name in self._files:
            module, _, leaf = name.rpartition(".")
            self._by_module.setdefault(module, []).append(leaf)

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor | None = self._read.get(name)
        if found is None:
            found = self._read[name] = self._files[name].get_tensor(name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def leaves(self, module: str) -> list[str]:
        """Last parts of the names of a module's tensors."""
        return self._by_module.get(module, [])

    def text(self, name: str) -> str:
        """The text that a tensor of bytes holds.

        Raises:
            ModelLoadError: it is none.
        """
        with suppress(ValueError):
            return bytes(self[name].flatten().tolist()).decode()
        raise ModelLoadError(f"The tensor {name} holds no text: the file is damaged; fetch it again.")
