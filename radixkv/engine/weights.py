# SPDX-License-Identifier: Apache-2.0
"""Seam between an engine and what gives its model other weights while it runs.

read      on any thread: other weights are read, checked and brought into their final form, beside those
          that serve; whatever is wrong with them is found here
install   on the engine's thread, between two steps: nothing can fail any more
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from radixkv.errors import InvalidRequestError

#: What becomes of running requests, in vLLM's words: `abort` ends them, `wait` waits for their end, `keep`
#: has them go on afterwards.
PauseMode = Literal["abort", "wait", "keep"]
#: Parts of an engine that sleep and are woken.
Tag = Literal["weights", "kv_cache"]
TAGS: frozenset[Tag] = frozenset(get_args(Tag))


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that have been read.

    Attributes:
        path: where they were read from; None: the model's own files.
        fingerprint: identifies configuration, weights and dtype.
        install: has the runner compute with them from the next step on.
    """

    path: str | None
    fingerprint: str
    install: Callable[[], None]


class WeightReader(Protocol):
    """Reader of weights for one engine's model."""

    def read(self, path: str | None) -> NewWeights:
        """Read the weights of a folder or file; None: of the model's own. Any thread.

        Raises:
            WeightUpdateError: they can't be read, or don't fit the model.
        """


def check_mode(mode: str) -> None:
    """Raise InvalidRequestError unless `mode` is a `PauseMode`."""
    if mode not in get_args(PauseMode):
        raise InvalidRequestError(f"mode must be abort, wait or keep, not {mode!r:.50}", param="mode")


def check_level(level: int) -> None:
    """Raise InvalidRequestError unless `level` is one of sleeping."""
    if type(level) is not int or not 0 <= level <= 2:
        raise InvalidRequestError(f"level must be 0, 1 or 2, not {level!r:.50}", param="level")


def check_tags(tags: object) -> frozenset[Tag]:
    """Return the tags to wake; None: all.

    Raises:
        InvalidRequestError: something is none.
    """
    if tags is None:
        return TAGS
    if not isinstance(tags, list | tuple | set | frozenset) or not tags or not TAGS.issuperset(tags):
        raise InvalidRequestError(f"tags must be of {sorted(TAGS)}, not {tags!r:.80}", param="tags")
    return frozenset(tags)
