# SPDX-License-Identifier: Apache-2.0
"""A folder of segments: its owner, and its files.

lock            held by the process that writes; its number is in it
00000007.seg    records, one after the other; never changed once they are written
00000007.txt    name and fingerprint of the records' model, for people
00000007.used   eight bytes for each record: the number of its last use, higher for a later one; a hint
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from pathlib import Path

from radixkv.errors import ConfigError

SEGMENT, ABOUT, USED, LOCK = ".seg", ".txt", ".used", "lock"
_NAME = re.compile(rf"(\d{{8}})({re.escape(SEGMENT)}|{re.escape(ABOUT)}|{re.escape(USED)})")

_locked: set[Path] = set()  # by this process, which the system's lock does not keep from locking twice
_locked_lock = threading.Lock()


def files_in(folder: Path) -> list[tuple[int, str]]:
    """Return number and ending of each file of ours, by number; ignore others."""
    names = (_NAME.fullmatch(name) for name in sorted(os.listdir(folder)))
    return [(int(name[1]), name[2]) for name in names if name]


def file_name(folder: Path, number: int, ending: str) -> str:
    """Return the path of a file of ours."""
    return f"{folder}/{number:08d}{ending}"


class FolderLock:
    """Lock of a folder's writer, held until it is released or the process ends, even by a crash.

    Args:
        folder: made if it is not there, for its owner alone.

    Raises:
        ConfigError: another one has it, or there can be no such folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder.resolve()
            with _locked_lock:
                if self._folder in _locked:
                    raise _in_use(folder, os.getpid())
                file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    # Unlike flock's, no lock that a forked process would go on holding.
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    other = os.read(file, 20).decode("ascii", "replace").strip()
                    os.close(file)
                    raise _in_use(folder, other or "?") from None
                _locked.add(self._folder)
                self._file = file
            os.ftruncate(file, 0)
            os.pwrite(file, b"%d\n" % os.getpid(), 0)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:  # such as a zero byte in it
            self.release()
            reason = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(
                f"the K/V tier's folder {folder}: {reason or error}; give a folder that can be written"
            ) from error

    def release(self) -> None:
        """Release the lock. May be called again."""
        with _locked_lock:
            if self._file is not None:
                _locked.discard(self._folder)
                os.close(self._file)
                self._file = None

    def __del__(self) -> None:
        if self._file is not None:
            self.release()


def _in_use(folder: Path, process: int | str) -> ConfigError:
    return ConfigError(
        f"the K/V tier's folder {folder} is in use by process {process}; "
        "give each server a folder of its own, or end the other one first"
    )


def process_using(folder: Path) -> str | None:
    """Return the process id of a folder's writer; None: there is none."""
    with _locked_lock:  # to close the file would end a lock of this process's own
        if folder.resolve() in _locked:
            return str(os.getpid())
    with (
        contextlib.suppress(FileNotFoundError, PermissionError),
        open(folder / LOCK, "rb+", buffering=0) as file,
    ):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return file.read(20).decode("ascii", "replace").strip() or "?"
    return None
