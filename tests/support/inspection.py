# SPDX-License-Identifier: Apache-2.0
"""The one way for tests to look at what is private: `inside(thing).name` is `thing._name`.

Behaviour is tested through public interfaces. What is left is here to be found: damage that a test does on
purpose, and counts that can be recomputed from nothing else.
"""

from __future__ import annotations

from typing import Any


class Inside:
    """Reads private attributes of `thing` by their names without the underscore."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, f"_{name}")


def inside(thing: Any) -> Any:
    """The inside of `thing`.

    Raises:
        AttributeError: on access; it has no such private attribute.
    """
    return Inside(thing)
