# SPDX-License-Identifier: Apache-2.0
"""The system's file calls, with an end at any of them: of a process that is killed, or a machine's power.

After a kill all that was done is there. After a loss of power only what was synced is certain: of the rest
each write is there, in part, as zeros or not at all, and files that were made or removed may not have been.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any


class Killed(BaseException):
    """The process has ended."""


class _File:
    """What of a file is certain, and what may be there.

    Attributes:
        synced: its bytes as of the last sync.
        writes: since then: where, and what.
        is_certain: whether its name in the folder is.
    """

    def __init__(self, content: bytes, *, is_certain: bool) -> None:
        self.synced = content
        self.writes: list[tuple[int, bytes]] = []
        self.is_certain = is_certain


class CrashingSystem:
    """Stands for the module `os`.

    Args:
        folder: whose files are followed.
        killed_at: the call that changes something, counted from 1, at which the end comes; before it, after
            it, or in the middle of a write.

    Attributes:
        num_calls: calls so far that change something.
    """

    def __init__(self, folder: Path, rng: random.Random, killed_at: int | None = None) -> None:
        self.folder, self.rng, self.killed_at = folder, rng, killed_at
        self.num_calls = 0
        self.is_dead = False
        self._open: dict[int, str] = {}
        self._files = {str(path): _File(path.read_bytes(), is_certain=True) for path in folder.glob("*.*")}
        self._removed: dict[str, _File] = {}  # and may come back

    def __getattr__(self, name: str) -> Any:
        if self.is_dead:
            raise Killed
        return getattr(os, name)

    def _changes(self) -> bool:
        """A call that changes something; True: it is the last one."""
        if self.is_dead:
            raise Killed
        self.num_calls += 1
        self.is_dead = self.num_calls == self.killed_at
        return self.is_dead

    def _do(self, call: Any) -> Any:
        if not self._changes():
            return call()
        if self.rng.random() < 0.5:
            call()
        raise Killed

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        def call() -> int:
            if not os.path.exists(path):
                self._files[str(path)] = _File(b"", is_certain=False)
            file = os.open(path, flags, mode)
            self._open[file] = str(path)
            return file

        if flags & os.O_CREAT and not self.is_dead:
            return self._do(call)
        if self.is_dead:
            raise Killed
        return call()

    def close(self, file: int) -> None:
        if self.is_dead:
            raise Killed
        del self._open[file]
        os.close(file)

    def pwritev(self, file: int, parts: Any, offset: int) -> int:
        data = b"".join(parts)
        last = self._changes()
        if last or self.rng.random() < 0.2:  # in part, as writes may
            data = data[: self.rng.randrange(len(data) + 1 if last else len(data)) or 1]
        self._files[self._open[file]].writes.append((offset, data))
        count = os.pwrite(file, data, offset)
        if last:
            raise Killed
        return count

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        return self.pwritev(file, [data], offset)

    def fdatasync(self, file: int) -> None:
        def call() -> None:
            known = self._files[self._open[file]]
            known.synced, known.writes = Path(self._open[file]).read_bytes(), []

        self._do(call)

    def fsync(self, file: int) -> None:
        def call() -> None:
            if self._open[file] != str(self.folder):
                raise AssertionError("only the folder is synced by fsync")
            self._removed.clear()
            for known in self._files.values():
                known.is_certain = True

        self._do(call)

    def unlink(self, path: Any) -> None:
        def call() -> None:
            os.unlink(path)
            self._removed[str(path)] = self._files.pop(str(path))

        self._do(call)

    # ------------------------------------------------------------------ after the end

    def bury(self, *, power_lost: bool) -> None:
        """Let go of its files, and leave in the folder what would be there."""
        self.is_dead = True
        for file in self._open:
            os.close(file)
        self._open.clear()
        if not power_lost:
            return
        for path, known in (*self._files.items(), *self._removed.items()):
            was_removed = self._files.get(path) is not known
            if (was_removed and self.rng.random() < 0.5) or not (known.is_certain or self.rng.random() < 0.5):
                if not was_removed:
                    Path(path).unlink(missing_ok=True)
                continue
            Path(path).write_bytes(self._torn(known))

    def _torn(self, known: _File) -> bytes:
        content = bytearray(known.synced)
        for offset, data in known.writes:
            fate = self.rng.random()
            if fate < 0.3:
                continue
            if fate < 0.6:
                data = data[: self.rng.randrange(len(data))]
            elif fate < 0.7:
                data = bytes(len(data))
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        return bytes(content)
