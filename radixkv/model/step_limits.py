# SPDX-License-Identifier: Apache-2.0
"""StepLimits: limits of a runner's steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a runner's steps.

    Attributes:
        max_num_tokens: largest T of a batch.
        max_num_seqs: most entries of a batch.
        max_model_len: longest context.
    """

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int
