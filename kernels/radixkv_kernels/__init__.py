# SPDX-License-Identifier: Apache-2.0
"""Paged attention for radixkv: one interface, a `cpu` backend and a `triton` backend (GPU).

    spec = KVSpec(...); kv = PagedKV(spec); backend = make_backend("cpu", spec=spec, ...)
    plan = backend.plan(query_starts, context_lengths, block_tables)      # once a step
    backend.write(kv, layer, key, value, slots)                           # once a layer, before attending
    output = backend.attend(kv, layer, query, plan, scale=...)

Triton and numba load only when a backend that needs them is made.
"""

from radixkv_kernels.interface import Ahead, AttentionBackend, AttentionPlan
from radixkv_kernels.kv_cache import Bytes, KVSpec, PagedKV
from radixkv_kernels.kv_groups import GroupedKV, KVGroup, KVLayout, make_kv
from radixkv_kernels.norm_rotary import LatentRotation, Norm, Pairs, QueryGrowth, RotaryTurn, Rotation
from radixkv_kernels.reference import reference_attention, reference_paged_attention
from radixkv_kernels.registry import BACKENDS, make_backend

__all__ = [
    "BACKENDS",
    "Ahead",
    "AttentionBackend",
    "AttentionPlan",
    "Bytes",
    "GroupedKV",
    "KVGroup",
    "KVLayout",
    "KVSpec",
    "LatentRotation",
    "Norm",
    "PagedKV",
    "Pairs",
    "QueryGrowth",
    "RotaryTurn",
    "Rotation",
    "make_backend",
    "make_kv",
    "reference_attention",
    "reference_paged_attention",
]
