# SPDX-License-Identifier: Apache-2.0
"""Opening of regular files alone: a pipe or a device, opened by mistake, would be waited for, for good.

Folders of models and adapters come from others. What is read of them is checked to be a file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes, unbuffered.

    Raises:
        OSError: it can't be opened, or is a pipe, a socket, a device or a folder.
    """
    # O_NONBLOCK: a pipe that nobody writes to is opened at once. Without effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise
