# SPDX-License-Identifier: Apache-2.0
"""Prices: costs of tokens by model, from a dated file."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

EXAMPLE = "example"
_FORM = (
    '{"date": "2026-11-01", "currency": "USD", "per_tokens": 1000000, "models": {"claude-sonnet-*": '
    '{"input": 3.0, "cache_read": 0.3, "cache_write": 3.75}}}'
)


@dataclass(frozen=True, slots=True)
class ModelPrices:
    """Prices of a prompt's token: computed, read from the cache, and written to it (for long, or not)."""

    input: float
    cache_read: float
    cache_write: float
    cache_write_long: float

    def prompt(self, tokens: int, cached: int, written: int = 0) -> float:
        """Return the cost of a prompt with these numbers of tokens read and written."""
        written = min(written, tokens - cached)
        rest = tokens - cached - written
        return rest * self.input + cached * self.cache_read + written * self.cache_write


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices by patterns of model names; the first match counts.

    Attributes:
        date: of when they are.
    """

    date: str
    currency: str
    models: dict[str, ModelPrices]

    def of(self, model: str) -> ModelPrices | None:
        """Return the prices of a model; None: not known."""
        name = model.lower()
        return next(
            (prices for pattern, prices in self.models.items() if fnmatch.fnmatch(name, pattern)), None
        )


def read_prices(given: str) -> Prices:
    """Read prices from a file; `example`: the dated prices that come with radixkv.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        if given == EXAMPLE:
            text = resources.files("radixkv.observe.audit").joinpath("example_prices.json").read_text("utf-8")
        else:
            text = Path(given).read_text("utf-8")
        value = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prices {given}: can't be read ({error}); expected {_FORM}") from None
    try:
        per = float(value.get("per_tokens", 1_000_000))
        models = {str(name).lower(): _model(entry, per) for name, entry in value["models"].items()}
        if not per > 0 or not models:
            raise ValueError
        return Prices(str(value["date"]), str(value.get("currency", "USD")), models)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"--prices {given}: not of the expected form, {_FORM}") from None


def _model(entry: dict[str, Any], per: float) -> ModelPrices:
    full = float(entry["input"])
    read, write = float(entry.get("cache_read", full)), float(entry.get("cache_write", full))
    long = float(entry.get("cache_write_long", write))
    if not all(0 <= price < float("inf") for price in (full, read, write, long)):
        raise ValueError
    return ModelPrices(full / per, read / per, write / per, long / per)
