# SPDX-License-Identifier: Apache-2.0
"""Write tensors that a program has in memory as a folder of weights, which is then read as any other is.

So weights from memory pass the checks of files, and processes other than this one can read them. Tensors
are written as they come: a generator needs memory for one shard only.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from radixkv.engine.config import EngineConfig
from radixkv.errors import ModelLoadError, WeightUpdateError
from radixkv.model.loading.loader import find_model
from radixkv.model.loading.weight_files import StoredTensor, stored_tensors

#: Bytes of tensors after which a file is written.
_SHARD_BYTES = 2 << 30
_CONFIG = "config.json"
_PLAIN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PLAIN_NAMES = frozenset({"F16", "BF16", "F32", "F64"})


class WrittenWeights:
    """A folder of weights, deleted when this object goes.

    Args:
        config: the engine's; names the served model, whose configuration the folder gets.

    Raises:
        WeightUpdateError: the served model is a GGUF file, whose tensors have no names of checkpoints.
    """

    def __init__(self, config: EngineConfig) -> None:
        try:
            source = find_model(config, False)
            self._served = {} if source.gguf_file is not None else stored_tensors(source.folder)
        except ModelLoadError as error:
            raise WeightUpdateError(f"The weights were not changed: {error}") from error
        if source.gguf_file is not None:
            raise WeightUpdateError(
                f"The weights of {source.name} were not changed: it is a GGUF file, and takes another "
                "GGUF file, no tensors."
            )
        self.path = Path(tempfile.mkdtemp(prefix="radixkv-weights-"))
        self._delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        shutil.copyfile(source.folder / _CONFIG, self.path / _CONFIG)
        self._files: dict[str, str] = {}
        self._shard: dict[str, torch.Tensor] = {}
        self._num_bytes = self._num_shards = 0

    @classmethod
    def of(
        cls, config: EngineConfig, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]
    ) -> WrittenWeights:
        """Write (name, tensor) pairs.

        Raises:
            WeightUpdateError: something is no such pair, or see `add`.
        """
        written = cls(config)
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        try:
            for pair in pairs:
                if not isinstance(pair, tuple | list) or len(pair) != 2:
                    raise WeightUpdateError(
                        f"The weights were not changed: {pair!r:.100} is no pair of a name and a tensor."
                    )
                written.add(*pair)
            written.finish()
        except BaseException:
            written.close()
            raise
        return written

    def add(self, name: str, tensor: Any) -> None:
        """Take a tensor.

        Raises:
            WeightUpdateError: it is no tensor with numbers, of another kind of number than the served one, or
                the name came before.
        """
        what = f"The weights were not changed: the tensor {name!r:.200}"
        if not isinstance(name, str) or not name:
            raise WeightUpdateError(f"The weights were not changed: {name!r:.100} is no name of a tensor.")
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise WeightUpdateError(f"{what} is no torch.Tensor with numbers but {type(tensor).__name__}.")
        if name in self._files:
            raise WeightUpdateError(f"{what} came twice.")
        problem = self._wrong_dtype(tensor.dtype, self._served.get(name))
        if problem:
            raise WeightUpdateError(f"{what} is {tensor.dtype}, {problem}.")
        if self._num_bytes and self._num_bytes + tensor.nbytes > _SHARD_BYTES:
            self._write()
        # A copy: the caller may write into the tensor later, and tensors of one file share no memory.
        self._shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._num_bytes += tensor.nbytes
        self._files[name] = f"part-{self._num_shards:05d}.safetensors"

    @staticmethod
    def _wrong_dtype(dtype: torch.dtype, served: StoredTensor | None) -> str | None:
        """Return what a tensor's type should be; None: it is right."""
        if served is None or served.dtype in _PLAIN_NAMES:
            return None if dtype in _PLAIN else "and must be of floating-point numbers of 16 or 32 bits"
        own = _STORED_NAMES.get(dtype)
        return None if own == served.dtype else f"and must be {served.dtype}, as in the served checkpoint"

    def finish(self) -> None:
        """Write what is left. Nothing is added afterwards.

        Raises:
            WeightUpdateError: there are no tensors.
        """
        if not self._files:
            raise WeightUpdateError("The weights were not changed: no tensor was given.")
        self._write()
        index = {"metadata": {}, "weight_map": self._files}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    def _write(self) -> None:
        if self._shard:
            save_file(self._shard, self.path / f"part-{self._num_shards:05d}.safetensors", {"format": "pt"})
            self._shard, self._num_bytes = {}, 0
            self._num_shards += 1

    def close(self) -> None:
        """Delete the folder. May be called again."""
        self._shard = {}
        self._delete()


_STORED_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
