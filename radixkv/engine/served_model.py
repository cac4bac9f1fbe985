# SPDX-License-Identifier: Apache-2.0
"""ServedModel: an engine's knowledge of its model, beside the runner that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixkv.images.image_processor import ImageProcessor
from radixkv.scheduling.length_classes import LengthClasses

if TYPE_CHECKING:  # engines without text do without its libraries
    from radixkv.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Names, limits and tokens of a model; plain data but for the tokenizer.

    Attributes:
        tokenizer: None: prompts are token ids, and outputs have no text (tests, benchmarks).
        max_model_len: longest prompt plus output, in tokens; the engine lowers it to what its pool holds.
        context_length: the most that the model is made for, or the settings allow; None: `max_model_len`.
        vocab_size: token ids must be below it; None: unchecked.
        end_token_ids: its end-of-sequence tokens.
        name: under which it is served.
        fingerprint: identifies configuration, weights and dtype; empty: unknown.
        default_sampling: arguments of SamplingParams for requests that don't give them.
        lengths: classes of lengths with rotary frequencies of their own; None: there is one.
        image_processor: how it takes images; None: it takes text alone.
    """

    tokenizer: Tokenizer | None
    max_model_len: int
    context_length: int | None = None
    vocab_size: int | None = None
    end_token_ids: frozenset[int] = frozenset()
    name: str = ""
    fingerprint: str = ""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    lengths: LengthClasses | None = None
    image_processor: ImageProcessor | None = None
