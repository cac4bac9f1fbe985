# SPDX-License-Identifier: Apache-2.0
"""Helper processes: Python programs that this one starts, with the modules that this one has.

`python -m` and `python -c` look for modules in the working folder first. A file `llguidance.py` or `json.py`
that lies in the folder in which a server is started would be run in place of the real one. Helpers therefore
search this process's path, and nothing before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Starts a module as a program: `[*MODULE, "radixkv", "serve"]`.
MODULE = (sys.executable, "-P", "-m")
_SAFE_PATH = "PYTHONSAFEPATH"


def helper_environment() -> dict[str, str]:
    """Return this process's environment with its module path, for a helper that imports the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def safe_helpers() -> Iterator[None]:
    """Start processes of other libraries, such as `multiprocessing`, likewise: those take no `-P`."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SAFE_PATH, None)
        else:
            os.environ[_SAFE_PATH] = before
