# SPDX-License-Identifier: Apache-2.0
"""Messages of ranks before they serve, and at their end: pickled, a few times in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radixkv.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of a rank: rank 0 sends them once."""

    config: EngineConfig
    rank: int


class Loaded(NamedTuple):
    """The rank has loaded the model of this fingerprint, and waits to hear where ranks meet."""

    fingerprint: str


class RankFailed(NamedTuple):
    """The rank ends, because of this."""

    reason: str
