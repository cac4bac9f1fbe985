# SPDX-License-Identifier: Apache-2.0
"""Codes of 2 to 8 bits in words of 32, in the three orders that checkpoints have them.

    rows      [out, in * bits / 32]    compressed-tensors: a word holds neighbouring inputs of one output
    columns   [in * bits / 32, out]    GPTQ: the same, transposed
    outputs   [in, out * bits / 32]    AWQ: a word holds 8 outputs of one input, in an order of its own

In the first two, code i takes bits `bits * i` and following of its row, the lowest bit first, so that codes
of 3 bits go on from word to word. Codes are unpacked when they are asked for, some outputs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from radixkv.model.stored_weights.affine_weight import unpacked_bits
from radixkv.model.stored_weights.stored_weight import ScaleGroupCut, take_rows

#: For each output of a word of AWQ, the place of its 4 bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_WORD = 32


class PackedCodes:
    """A matrix of unsigned codes, [out, in].

    Args:
        words: int32, as the order has them.
        bits: of a code.
        order: see above.
        in_features: inputs; None: as many as the words hold.

    Raises:
        ValueError: words that are no such matrix.
    """

    def __init__(
        self,
        words: Tensor,
        bits: int,
        order: Literal["rows", "columns", "outputs"],
        in_features: int | None = None,
    ) -> None:
        if words.ndim != 2 or words.dtype != torch.int32 or not 2 <= bits <= 8:
            raise ValueError(f"codes of {bits} bits are {list(words.shape)} of {words.dtype}")
        if order == "outputs" and bits != 4:
            raise ValueError(f"codes of AWQ have 4 bits, not {bits}")
        first, second = words.shape
        if order == "outputs":
            self.out_features, held = second * _WORD // bits, first
        else:
            self.out_features, count = (first, second) if order == "rows" else (second, first)
            held = count * _WORD // bits
        self.in_features = held if in_features is None else in_features
        if not held - _WORD < self.in_features <= held:
            raise ValueError(f"{self.in_features} inputs do not go into words for {held}")
        self.words, self.bits, self.order = words, bits, order

    def rows(self, own: range) -> Tensor:
        """Codes of some outputs, uint8 [len(own), in]."""
        if self.order == "outputs":
            return self._unpacked_outputs(own)
        words = self.words[own.start : own.stop]
        if self.order == "columns":
            words = self.words[:, own.start : own.stop].t()
        octets = words.reshape(-1).contiguous().view(torch.uint8).view(len(words), -1)
        return unpacked_bits(octets, self.bits, self.in_features)

    def _unpacked_outputs(self, own: range) -> Tensor:
        first = own.start // 8
        words = self.words[:, first : -(-own.stop // 8)]
        shifts = 4 * torch.tensor(_AWQ_PLACES, dtype=torch.int32, device=words.device)
        codes = ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)
        return codes[:, own.start - 8 * first :][:, : len(own)].t().contiguous()

    def of_outputs(self, spans: Sequence[range]) -> PackedCodes:
        """Codes of some outputs, one span after the other.

        Raises:
            ScaleGroupCut: a span cuts a word.
        """
        if self.order == "rows":
            return PackedCodes(take_rows(self.words, spans), self.bits, self.order, self.in_features)
        if self.order == "outputs":
            spans = [_words(span, 8, "Outputs") for span in spans]
        words = torch.cat([self.words[:, span.start : span.stop] for span in spans], dim=1)
        return PackedCodes(words, self.bits, self.order, self.in_features)

    def of_inputs(self, own: range) -> PackedCodes:
        """Codes of some inputs.

        Raises:
            ScaleGroupCut: they cut a word.
        """
        if self.order == "outputs":
            return PackedCodes(self.words[own.start : own.stop], self.bits, self.order, len(own))
        held = _WORD if _WORD % self.bits else _WORD // self.bits
        words = _words(own, held, "Inputs")
        step = held * self.bits // _WORD
        part = slice(words.start * step, words.stop * step)
        cut = self.words[:, part] if self.order == "rows" else self.words[part]
        return PackedCodes(cut.contiguous(), self.bits, self.order, len(own))

    @classmethod
    def concat(cls, codes: Sequence[PackedCodes]) -> PackedCodes:
        """Codes of the same inputs, one above the other.

        Raises:
            ScaleGroupCut: they differ in bits or order.
        """
        first = codes[0]
        if any((each.bits, each.order) != (first.bits, first.order) for each in codes):
            raise ScaleGroupCut("weights with codes in different orders are not one product")
        dim = 0 if first.order == "rows" else 1
        words = torch.cat([each.words for each in codes], dim)
        return cls(words, first.bits, first.order, first.in_features)

    def to(self, device: torch.device) -> PackedCodes:
        """The same codes on a device."""
        return PackedCodes(self.words.to(device), self.bits, self.order, self.in_features)


def _words(own: range, held: int, what: str) -> range:
    if own.start % held or own.stop % held:
        raise ScaleGroupCut(
            f"{what} {own.start} to {own.stop} of a quantised weight begin or end within {held} that are "
            f"packed together: split it at multiples of {held}"
        )
    return range(own.start // held, own.stop // held)
