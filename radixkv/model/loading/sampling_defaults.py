# SPDX-License-Identifier: Apache-2.0
"""The sampling that a model's makers recommend, from its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.errors import InvalidRequestError, ModelLoadError
from radixkv.sampling.sampling_params import SamplingParams

#: Entries of the file that SamplingParams has under the same name.
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_source(defaults: Mapping[str, Any], generation_config: str) -> str:
    """Origin of the values for requests that give none, in words for users.

    Args:
        defaults: what `sampling_defaults` found.
        generation_config: the setting of that name, `auto` or `none`.
    """
    if generation_config == "none":
        return "--generation-config none"
    return "the model's generation_config.json" if defaults else "radixkv; the model recommends none"


def sampling_defaults(name: str, model: Any) -> dict[str, Any]:
    """Arguments of SamplingParams that the model's generation configuration sets; others are not in it.

    Args:
        name: the model's, for errors.
        model: a transformers model.

    Raises:
        ModelLoadError: a value is out of range.
    """
    config = getattr(model, "generation_config", None)
    found = {} if config is None else config.to_diff_dict()
    defaults = {key: found[key] for key in NAMES if found.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelLoadError(
            f"generation_config.json of {name} can't be used: {error}. Correct it, or leave its sampling out "
            "with --generation-config none."
        ) from None
    return defaults
