# SPDX-License-Identifier: Apache-2.0
"""Damages of a GGUF file's header: bytes, numbers at their extremes, pieces cut out or doubled, a cut end."""

from __future__ import annotations

import random
import struct

_EXTREMES = (0, 1, 2, 31, 2**16, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def damaged(whole: bytes, end: int, chance: random.Random) -> bytes:
    """A file with one to three damages before `end`, the end of its header."""
    data = bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        end = min(end, len(data))  # an earlier damage may have cut the header
        if end <= 4:
            break
        at = chance.randrange(4, end)
        kind = chance.randrange(7)
        if kind == 0:
            data[at] = chance.choice((0, 1, 255, chance.randrange(256)))
        elif kind == 1:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            size, form = chance.choice(((4, "<I"), (8, "<Q")))
            data[at : at + size] = struct.pack(form, chance.choice(_EXTREMES) % 256**size)
        elif kind == 3:
            del data[at : at + chance.choice((1, 4, 8, 200))]
        elif kind == 4:
            data[at:at] = data[at : at + chance.choice((1, 4, 8, 200))]
        elif kind == 5:
            del data[chance.randrange(len(data)) :]
        else:
            numbers = _numbers(data, end)
            place, form = chance.choice(numbers) if numbers else (at, "<I")
            data[place : place + struct.calcsize(form)] = struct.pack(
                form, chance.choice(_EXTREMES) % 256 ** struct.calcsize(form)
            )
    return bytes(data)


def _numbers(data: bytearray, end: int) -> list[tuple[int, str]]:
    """Places of the sizes that values and tensors have, as far as their names are whole."""
    found: list[tuple[int, str]] = []
    for name in (b"block_count", b"embedding_length", b"head_count", b"head_count_kv", b"vocab_size",
                 b"feed_forward_length", b"context_length", b"freq_base", b"_token_id"):  # fmt: skip
        at = data.find(name, 0, end)
        if at >= 0:
            found.append((at + len(name) + 4, "<I"))
    for name in (b"attn_q.weight", b"token_embd.weight", b"output_norm.weight", b"ffn_up.weight"):
        at = data.find(name, 0, end)
        if at >= 0:
            found += [(at + len(name) + 4, "<Q"), (at + len(name) + 12, "<Q")]
    return found
