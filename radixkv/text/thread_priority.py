# SPDX-License-Identifier: Apache-2.0
"""Priority of background threads beside the model's steps."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def yield_to_steps(niceness: int = 19) -> None:
    """On Linux, leave the cores to the model's threads while they need them; elsewhere do nothing.

    A step is as slow as its slowest thread: with equal shares, a megabyte of text being tokenised on two
    cores made steps of 30 ms take up to 190; so they take at most 80, and the text as long as before.

    Args:
        niceness: 19: the least there is; 10: about a tenth of a busy core.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
