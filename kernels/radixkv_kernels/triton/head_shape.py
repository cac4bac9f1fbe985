# SPDX-License-Identifier: Apache-2.0
"""Shape of heads in the attention kernel: parts in which a head is loaded, query heads of a program.

A tile's sides are powers of two. Keys and values of one size up to 256 are padded to the next one. Other keys
are loaded as the largest power of two that they hold and a rest: 576 elements as 512 and 64, not as 1,024.
"""

from __future__ import annotations

from typing import Any

import triton

from radixkv_kernels.kv_cache import KVSpec

#: Most elements of a value: a program keeps a row of sums of as many.
LARGEST_VALUE = 512
#: Smallest side of a product.
_LEAST = 16
#: Query heads of a program where heads have more than 256 elements: their sums fill the registers.
_WIDE_HEADS = 32
#: The same where a tile of keys is its values, too: the widest products take 64 rows.
_LATENT_HEADS = 64


def head_constants(spec: KVSpec) -> dict[str, Any]:
    """The attention kernel's constants that describe keys and values.

    Raises:
        ValueError: values of more than 512 elements.
    """
    keys, values = spec.head_size, spec.value_size
    if values > LARGEST_VALUE:
        raise ValueError(
            f"the triton backend reads values of up to {LARGEST_VALUE} elements, not of {values}: use the "
            "cpu backend"
        )
    padded = max(_LEAST, triton.next_power_of_2(keys))
    rest = 0
    if padded > keys and (keys > 256 or keys != values):
        padded = max(_LEAST, padded // 2)
        rest = max(_LEAST, triton.next_power_of_2(keys - padded)) if keys > padded else 0
    padded_values = max(_LEAST, triton.next_power_of_2(values))
    return {
        "D": keys,
        "DP": padded,
        "DR": rest,
        "V": values,
        "VP": padded_values,
        "VALUE_ROW": keys if spec.value_in_key else values,
        "REUSE": spec.value_in_key and values == padded and spec.quantization is None,
    }


def widest(spec: KVSpec) -> int:
    """The size of heads that tiles are chosen for."""
    return max(spec.head_size, spec.value_size)


def heads_per_program(head_size: int, group_size: int, *, latents: bool = False) -> int:
    """The query heads of one KV head that a program takes: a divisor of the group's size.

    Args:
        latents: programs run with the tiles of latents.
    """
    if head_size <= 256:
        return group_size
    most = _LATENT_HEADS if latents else _WIDE_HEADS
    return max(n for n in range(1, min(group_size, most) + 1) if group_size % n == 0)
