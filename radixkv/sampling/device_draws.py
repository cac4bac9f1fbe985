# SPDX-License-Identifier: Apache-2.0
"""Choices of tokens on a GPU: the settings of a step's rows, for the one kernel that reads their logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from radixkv.sampling.device_arrays import to_device
from radixkv.sampling.sampling_params import SamplingParams


def choose_on_device(
    logits: torch.Tensor,
    rows: Sequence[int],
    processed: torch.Tensor,
    places: Mapping[int, int],
    masks: Mapping[int, np.ndarray[tuple[int], np.dtype[np.int32]]],
    drawing: Sequence[tuple[int, SamplingParams, float]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row; waits for nothing.

    Args:
        logits: [S, V]. rows: of each row here, its row there.
        processed: float32 [N, V]. places: row -> the row there that is read instead.
        masks: row -> its bits, see `TokenMask.bits`.
        drawing: (row, parameters, random number) of rows that are drawn; others get the likeliest.

    Returns:
        See `radixkv_kernels.triton.sample.sample_rows`.
    """
    from radixkv_kernels.triton.sample import COLUMNS, sample_rows  # needs triton

    settings = np.zeros((len(rows), COLUMNS))
    settings[:, 0] = rows
    settings[:, 1:3] = -1
    if places:
        settings[list(places), 1] = list(places.values())
    if masks:
        settings[list(masks), 2] = range(len(masks))
    if drawing:
        settings[[row for row, _, _ in drawing], 3:] = [
            (number, p.temperature, max(p.top_k, 0), p.top_p, _reach(p)) for _, p, number in drawing
        ]
    words = np.stack(list(masks.values())) if masks else np.empty((0, 1), np.int32)
    device = logits.device
    return sample_rows(logits, processed, to_device(words, device), to_device(settings, device))


def _reach(params: SamplingParams) -> float:
    """Return by how much a logit that min_p keeps is below the highest one at most."""
    return -math.log(params.min_p) * params.temperature if params.min_p > 0.0 else math.inf
