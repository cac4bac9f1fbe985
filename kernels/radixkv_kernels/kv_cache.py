# SPDX-License-Identifier: Apache-2.0
"""PagedKV: the storage of every layer's keys and values, in blocks of a fixed number of token slots.

Layout, for K and for V alike (each with its own head size)::

    data   [num_layers, num_kv_heads, num_blocks, block_size, head_size]     storage dtype
    scale  [num_layers, num_kv_heads, num_blocks, block_size]                float32, quantised caches only

Heads come before blocks, so that the rows of one head in one block are one contiguous run (as kernels
read them), and gathering the blocks of a request gives the `[num_kv_heads, tokens, head_size]` of dense
attention without a transposition. A *slot* is `block * block_size + offset`; position p of a request lives in
slot `block_table[p // block_size] * block_size + p % block_size`.

Where values are the first elements of the keys (latent attention), only keys are stored, and `value` is a
view of them. Layers of different shapes have one such storage each: see `kv_groups`.

Quantised caches keep one scale per (token, head), found when the token is written: there is nothing to
calibrate, and the stored form of a token does not depend on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

#: Object that holds bytes.
Bytes: TypeAlias = "bytes | bytearray | memoryview | np.ndarray"

#: Largest finite value a quantised element takes, by quantisation.
QUANTIZED_MAX = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
QUANTIZED_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Most elements of a head.
LARGEST_HEAD = 576


@dataclass(frozen=True)
class KVSpec:
    """Shape and type of a paged cache.

    Args:
        num_layers: attention layers.
        num_blocks: blocks per layer.
        block_size: token slots per block, a power of two from 8 to 256.
        num_kv_heads: key/value heads.
        head_size: elements of a key head, a multiple of 8 up to 576.
        dtype: float32, bfloat16 or float16. With `quantization` set, the storage dtype follows from it and
            this may be either that dtype or the compute dtype.
        device: where the cache lives.
        quantization: None, `int8`, `fp8_e4m3` or `fp8_e5m2`.
        value_size: elements of a value head, a multiple of 8; 0: as many as a key's.
        value_in_key: values are the first `value_size` elements of the keys, and not stored again.

    Raises:
        ValueError: a value is out of range; the message names it and the range.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    quantization: str | None = None
    value_size: int = 0
    value_in_key: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))
        object.__setattr__(self, "value_size", self.value_size or self.head_size)
        for name in ("num_layers", "num_blocks", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.block_size not in (8, 16, 32, 64, 128, 256):
            raise ValueError(f"block_size must be a power of two from 8 to 256, got {self.block_size}")
        for name in ("head_size", "value_size"):
            size = getattr(self, name)
            if not 8 <= size <= LARGEST_HEAD or size % 8:
                raise ValueError(f"{name} must be a multiple of 8 from 8 to {LARGEST_HEAD}, got {size}")
        if self.value_in_key and self.value_size > self.head_size:
            raise ValueError(
                f"values of {self.value_size} elements can't be part of keys of {self.head_size}"
            )
        if self.quantization is None:
            if self.dtype not in COMPUTE_DTYPES:
                raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype}")
        elif self.quantization not in QUANTIZED_DTYPES:
            raise ValueError(
                f"quantization must be None or one of {sorted(QUANTIZED_DTYPES)}, got {self.quantization!r}"
            )

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the stored elements."""
        return self.dtype if self.quantization is None else QUANTIZED_DTYPES[self.quantization]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes one token takes in all layers: K, V and their scales."""
        scale = 0 if self.quantization is None else 4
        sizes = (self.head_size,) if self.value_in_key else (self.head_size, self.value_size)
        element = sum(size * self.storage_dtype.itemsize + scale for size in sizes)
        return self.num_layers * self.num_kv_heads * element

    @property
    def bytes_per_block(self) -> int:
        """Bytes one block takes in all layers: K, V and their scales."""
        return self.block_size * self.bytes_per_slot


class PagedKV:
    """The allocated cache of one model. Memory is not cleared: unwritten slots may hold anything, NaN
    included.

    Attributes:
        spec: the shape it was made with.
        key, value: `[num_layers, num_kv_heads, num_blocks, block_size, size]`, storage dtype; size is
            `head_size` and `value_size`.
        key_scale, value_scale: `[num_layers, num_kv_heads, num_blocks, block_size]` float32, or None.
    """

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        shape = (spec.num_layers, spec.num_kv_heads, spec.num_blocks, spec.block_size, spec.head_size)
        self.key = torch.empty(shape, dtype=spec.storage_dtype, device=spec.device)
        self.key_scale: torch.Tensor | None = None
        self.value_scale: torch.Tensor | None = None
        if spec.quantization is not None:
            self.key_scale = torch.empty(shape[:-1], dtype=torch.float32, device=spec.device)
        if spec.value_in_key:
            self.value, self.value_scale = self.key[..., : spec.value_size], self.key_scale
            return
        self.value = torch.empty((*shape[:-1], spec.value_size), dtype=spec.storage_dtype, device=spec.device)
        if spec.quantization is not None:
            self.value_scale = torch.empty(shape[:-1], dtype=torch.float32, device=spec.device)

    def __repr__(self) -> str:
        s = self.spec
        size = s.num_blocks * s.bytes_per_block / 2**20
        kind = s.quantization or str(s.dtype).removeprefix("torch.")
        return (
            f"PagedKV({s.num_layers} layers, {s.num_blocks} blocks of {s.block_size}, {kind}, {size:.1f} MiB)"
        )

    def clear(self, num_blocks: int) -> None:
        """Set the first blocks to zero, in all layers. It makes the system provide their memory now."""
        for tensor in self.tensors():
            indexable(tensor[:, :, :num_blocks]).zero_()

    def tensors(self) -> list[torch.Tensor]:
        """All storage tensors: key, value and, when quantised, their scales. Values that lie in the keys
        are none of their own."""
        own = (self.key, self.key_scale)
        if not self.spec.value_in_key:
            own = (self.key, self.value, self.key_scale, self.value_scale)  # type: ignore[assignment]
        return [t for t in own if t is not None]

    def read(
        self, layer: int, block_table: np.ndarray, num_tokens: int, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy of the first `num_tokens` keys and values of one request: two `[num_tokens, Hkv, size]` in
        `dtype`.

        For tests, export and debugging: O(num_tokens) and allocates.
        """
        blocks = torch.as_tensor(np.asarray(block_table, dtype=np.int64), device=self.spec.device)
        value = self._read(self.value, self.value_scale, layer, blocks, num_tokens, dtype)
        return self.read_keys(layer, blocks, num_tokens, dtype), value

    def read_keys(
        self, layer: int, blocks: torch.Tensor, num_tokens: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Copy of the first `num_tokens` keys of one request, `[num_tokens, Hkv, size]` in `dtype`.

        Args:
            blocks: int64, the request's, on the device.
        """
        return self._read(self.key, self.key_scale, layer, blocks, num_tokens, dtype)

    def _read(
        self,
        data: torch.Tensor,
        scale: torch.Tensor | None,
        layer: int,
        blocks: torch.Tensor,
        num_tokens: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        blocks = blocks[: -(-num_tokens // self.spec.block_size)]
        rows = data[layer][:, blocks].to(dtype)
        if scale is not None:
            rows = rows * scale[layer][:, blocks].to(dtype).unsqueeze(-1)
        return rows.flatten(1, 2)[:, :num_tokens].transpose(0, 1).contiguous()

    def save_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        """Copy the contents of some blocks, in a form that depends neither on their ids nor on the device.

        Of each block, one storage tensor after the other (key, value, then their scales), the bytes of its
        `[num_layers, num_kv_heads, block_size, size]` elements (scales: without the last dimension).

        Returns:
            uint8 [len(blocks), spec.bytes_per_block], a copy.
        """
        if self.spec.device.type != "cpu":
            saved: np.ndarray = self.gather_blocks(blocks).cpu().numpy()
            return saved
        saved = np.empty((len(blocks), self.spec.bytes_per_block), np.uint8)
        read = self.block_reader()
        for row, block in zip(saved, blocks, strict=True):
            read(block, row)
        return saved

    def block_reader(self) -> Callable[[int, np.ndarray], None]:
        """Return a function that copies a block of a CPU's cache, as `save_blocks` does, into a row of bytes.

        The row is uint8 [spec.bytes_per_block]. The function may be called on any thread while the block is
        not written; it makes no use of torch's threads.
        """
        memories = [(part.numpy(), columns) for part, columns in self._byte_parts()]

        def read(block: int, row: np.ndarray) -> None:
            for memory, columns in memories:
                source = memory[:, :, block]
                np.copyto(row[columns].reshape(source.shape), source)

        return read

    def load_blocks(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Write what `save_blocks` returned into `blocks`, which need not be the ids it came from.

        Args:
            data: each block's bytes: rows returned by `save_blocks`, or any buffers of that size.

        Raises:
            ValueError: they are not as many or not as long as they should be; nothing was written.
        """
        rows = saved_rows(data, len(blocks), self.spec.bytes_per_block, f"the K/V of {len(blocks)} blocks is")
        if not rows:
            return
        if self.spec.device.type != "cpu":
            self.scatter_blocks(blocks, torch.from_numpy(np.stack(rows)).to(self.spec.device))
            return
        for part, columns in self._byte_parts():
            memory = part.numpy()
            for row, block in zip(rows, blocks, strict=True):
                target = memory[:, :, block]
                np.copyto(target, row[columns].reshape(target.shape))

    def gather_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return what `save_blocks` does, as a tensor of the device; waits for nothing."""
        index = sent_index(blocks, self.spec.device)
        parts = [part.index_select(2, index).movedim(2, 0).flatten(1) for part, _ in self._byte_parts()]
        return torch.cat(parts, 1)

    def scatter_blocks(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Write what `gather_blocks` returned into `blocks`; waits for nothing."""
        index = sent_index(blocks, self.spec.device)
        for part, columns in self._byte_parts():
            shape = (len(rows), part.shape[0], part.shape[1], part.shape[3])
            part.index_copy_(2, index, rows[:, columns].reshape(shape).movedim(0, 2))

    def _byte_parts(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Each storage tensor as uint8 [num_layers, num_kv_heads, num_blocks, bytes], and where in a block's
        bytes it stands."""
        end = 0
        for tensor in self.tensors():
            part = tensor.view(torch.uint8).flatten(3)
            start, end = end, end + part.shape[0] * part.shape[1] * part.shape[3]
            yield part, slice(start, end)


def sent_index(ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return ids as int64 on a device. Copied from pinned memory, they wait for no launched work."""
    index = torch.tensor(ids, dtype=torch.int64)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def saved_rows(data: Sequence[Bytes], count: int, size: int, what: str) -> list[npt.NDArray[np.uint8]]:
    """Return saved blocks or states as uint8 rows of `size` bytes, without a copy.

    Raises:
        ValueError: they are not `count`, or not of that size; it begins with `what`.
    """
    rows = [np.frombuffer(row, np.uint8) for row in data]
    if len(rows) != count or any(len(row) != size for row in rows):
        raise ValueError(
            f"{what} {count} times {size} bytes, not "
            f"{[len(row) for row in rows[:4]]}{'...' if len(rows) > 4 else ''}"
        )
    return rows


def indexable(t: torch.Tensor) -> torch.Tensor:
    """The tensor, one-byte floats as uint8: indexing operators do not all take float8."""
    return t.view(torch.uint8) if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else t


def quantize(x: torch.Tensor, quantization: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows of the last dimension: `x [..., D]` -> (data `[..., D]`, scale `[...]` float32).

    The scale maps the row's largest magnitude to the format's largest value. Each row depends on itself
    alone.
    """
    limit = QUANTIZED_MAX[quantization]
    wide = x.to(torch.float32)
    scale = wide.abs().amax(dim=-1) * (1.0 / limit)
    # A row of zeros keeps scale 1, since 0 / 0 would store NaN.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    scaled = (wide / scale.unsqueeze(-1)).clamp_(-limit, limit)
    if quantization == "int8":
        scaled = scaled.round_()
    return scaled.to(QUANTIZED_DTYPES[quantization]), scale
