# SPDX-License-Identifier: Apache-2.0
"""Check that other weights belong to a served model: their configurations must mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError

#: Keys that change no number: who wrote the file, how generation ends, and what training used.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def check_same_model(served: Any, other: Any, path: Path) -> None:
    """Compare the transformers configurations of a served model and of other weights.

    Raises:
        ModelLoadError: names the keys that differ, and the first one's values.
    """
    ours, theirs = _plain(served.to_dict()), _plain(other.to_dict())
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differing:
        first = differing[0]
        raise ModelLoadError(
            f"the configuration in {path} is that of another model: {', '.join(differing)} differ ({first} "
            f"is {theirs.get(first)!r:.80}, here it is {ours.get(first)!r:.80}). Give weights of the served "
            "model, or restart the engine with the other one."
        )


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _WITHOUT_EFFECT
    }
