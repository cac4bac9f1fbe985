# SPDX-License-Identifier: Apache-2.0
"""Images of a step on several ranks: rank 0 alone encodes them, and the others are sent what goes into rows.

Behind the batch, as int64:

    I W D has_rope ahead | rows I | rope 3 T | ahead T

I: rows of images, W: their width, D: layers behind which more is added to them, ahead: 0, none; 1, in all
layers; 2, in windows. Then the ranks broadcast what goes into the rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.parallel.commands import Words
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.vision.encoder_cache import Encoding
from radixkv.model.vision.step_images import StepImages
from radixkv_kernels import Ahead

_HEAD = 5


def share_images(shown: StepImages | None, dtype: torch.dtype) -> tuple[Words, Encoding | None]:
    """Return what the other ranks are told about a step's images, and what they are sent next.

    Args:
        shown: the images; None: the step has none.
        dtype: of the model.
    """
    if shown is None:
        return np.zeros(0, np.int64), None
    rows = np.concatenate([np.zeros(0, np.int64), *shown.rows])
    encoding = shown.joined(dtype) if len(rows) else None
    if encoding is not None:  # joined once
        shown.rows, shown.encodings = [rows], [(encoding, 0, len(rows))]
    head = [
        len(rows),
        0 if encoding is None else encoding.rows.shape[1],
        0 if encoding is None else len(encoding.deep),
        shown.rope is not None,
        0 if shown.ahead is None else 1 + shown.ahead.in_windows_only,
    ]
    columns: list[npt.NDArray[np.integer]] = [np.array(head), rows]
    if shown.rope is not None:
        columns.append(shown.rope.reshape(-1))
    if shown.ahead is not None:
        columns.append(shown.ahead.counts)
    return np.concatenate(columns).astype(np.int64), encoding


def take_images(
    words: Words, num_tokens: int, dtype: torch.dtype, communicator: Communicator
) -> StepImages | None:
    """Return a step's images on another rank, from what it was told and is sent now.

    Args:
        words: of `share_images`.
        num_tokens: T, of the step.
    """
    if not len(words):
        return None
    num_rows, width, num_deep, has_rope, ahead = words[:_HEAD].tolist()
    rows, rest = words[_HEAD : _HEAD + num_rows], words[_HEAD + num_rows :]
    shown = StepImages()
    if has_rope:
        shown.rope, rest = rest[: 3 * num_tokens].reshape(3, -1), rest[3 * num_tokens :]
    if ahead:
        shown.ahead = Ahead(rest.astype(np.int32), ahead == 2)
    if num_rows:
        first, *deep = (
            torch.empty(num_rows, width, dtype=dtype, device=communicator.device) for _ in range(1 + num_deep)
        )
        encoding = Encoding(first, tuple(deep))
        broadcast(encoding, communicator)
        shown.rows, shown.encodings = [rows], [(encoding, 0, num_rows)]
    return shown


def broadcast(encoding: Encoding, communicator: Communicator) -> None:
    """Replace an encoding's numbers by those of rank 0; all ranks call it."""
    for each in (encoding.rows, *encoding.deep):
        communicator.take_first(each)
