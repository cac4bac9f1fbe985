# SPDX-License-Identifier: Apache-2.0
"""Python code that runs as if what the base install does without were not there."""

from __future__ import annotations

from radixkv.entrypoints.extras import SERVING

_BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def without_extras(code: str) -> str:
    """The code, for a process of its own, after a line that lets nothing of the extras be imported."""
    return _BLOCK.format(names=sorted(SERVING | {"numba", "triton"})) + code
