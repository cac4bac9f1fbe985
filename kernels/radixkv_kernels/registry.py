# SPDX-License-Identifier: Apache-2.0
"""Make backends of attention and of states by name; a backend's package (triton, numba) loads only then."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch

from radixkv_kernels.chunked_backend import ChunkedBackend
from radixkv_kernels.cpu.torch_backend import TorchBackend
from radixkv_kernels.grouped_backend import GroupedBackend
from radixkv_kernels.interface import AttentionBackend, BackendConfig
from radixkv_kernels.kv_cache import KVSpec
from radixkv_kernels.kv_groups import KVGroup, KVLayout
from radixkv_kernels.state_interface import StateBackend

logger = logging.getLogger(__name__)

BACKENDS = ("cpu", "triton")


def numba_available() -> bool:
    """Return True if the compiled CPU kernels can be used: numba (the `cpu` extra) can be imported."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        import numba  # noqa: F401 - optional, and slow to import
    except ImportError as error:  # as where numpy is newer than it knows
        logger.warning("numba is installed, but can't be imported, so CPU kernels are torch's: %s", error)
        return False
    return True


def make_backend(
    name: str,
    *,
    num_query_heads: int = 0,
    spec: KVSpec | KVLayout,
    compute_dtype: torch.dtype,
    deterministic: bool = False,
    share_prefixes: bool = True,
    max_num_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> AttentionBackend:
    """Build the attention backend of one model.

    Args:
        name: `cpu` or `triton` (GPU; also CPU tensors under Triton's interpreter).
        num_query_heads, spec, compute_dtype, deterministic, share_prefixes, max_num_tokens, max_num_seqs,
            max_model_len: see `BackendConfig`. A layout says the query heads of its groups itself.

    Raises:
        ValueError: an unknown name, or values that do not fit together.
        ImportError: the backend's package (triton) is not installed.
    """
    limits: dict[str, Any] = {
        "compute_dtype": compute_dtype,
        "deterministic": deterministic,
        "share_prefixes": share_prefixes,
        "max_num_tokens": max_num_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
    }
    if isinstance(spec, KVSpec):
        return _build(name, BackendConfig(num_query_heads=num_query_heads, spec=spec, **limits))
    backends = [
        _build_group(name, group, own, limits) for group, own in zip(spec.groups, spec.specs, strict=True)
    ]
    if spec.is_plain:
        return backends[0]
    return GroupedBackend(spec, backends)


def make_state_backend(name: str, *, deterministic: bool = False) -> StateBackend:
    """Build the backend of state layers that belongs to an attention backend of this name.

    Args:
        deterministic: outputs have the same bits however a request's rows come; on a CPU they always do.

    Raises:
        ImportError: its package (triton, numba) is not installed.
    """
    if name == "triton":
        from radixkv_kernels.triton.state.backend import TritonStates  # triton is optional

        return TritonStates(deterministic=deterministic)
    from radixkv_kernels.cpu.recurrence.backend import CpuStates  # numba is optional

    return CpuStates()


def _build_group(name: str, group: KVGroup, spec: KVSpec, limits: dict[str, Any]) -> AttentionBackend:
    heads = group.num_query_heads
    if group.window is not None:
        # A block before one request's window may be another's by now: equal tables mean nothing there.
        limits = limits | {"share_prefixes": False}
    if group.chunk is None:
        return _build(name, BackendConfig(num_query_heads=heads, spec=spec, **limits))
    # The kernels see a request for each chunk that has queries.
    requests = 2 * limits["max_num_seqs"] + limits["max_num_tokens"] // group.chunk
    inner = _build(
        name,
        BackendConfig(num_query_heads=heads, spec=spec, **limits | {"max_num_seqs": requests}),
    )
    return ChunkedBackend(inner, group.chunk)


def _build(name: str, config: BackendConfig) -> AttentionBackend:
    if name == "triton":
        from radixkv_kernels.triton.backend import TritonBackend  # triton is optional

        return TritonBackend(config)
    if name != "cpu":
        raise ValueError(f"unknown attention backend {name!r}: one of {', '.join(BACKENDS)}")
    if numba_available():
        from radixkv_kernels.cpu.attention.backend import CpuBackend  # numba is optional

        return CpuBackend(config)
    return TorchBackend(config)
