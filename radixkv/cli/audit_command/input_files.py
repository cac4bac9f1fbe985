# SPDX-License-Identifier: Apache-2.0
"""The files of an audit: pipes, which can be read only once, are copied first."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from radixkv.errors import ConfigError

STDIN = Path("-")


@contextmanager
def readable_again(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """The paths, each of a file that can be read as often as wanted; `-` is the standard input.

    Raises:
        ConfigError: the input of a pipe can't be read or kept.
    """
    with tempfile.TemporaryDirectory(prefix="radixkv-audit-") as folder:
        found = []
        for number, path in enumerate(paths):
            if path != STDIN and (path.is_file() or path.is_dir() or not path.exists()):
                found.append(path)
                continue
            copy = Path(folder) / str(number) / ("stdin" if path == STDIN else path.name)
            copy.parent.mkdir()
            try:
                if path == STDIN:
                    _copy(sys.stdin.buffer, copy)
                else:
                    with path.open("rb") as stream:
                        _copy(stream, copy)
            except OSError as error:
                raise ConfigError(f"audit: {path}: can't be read ({error.strerror or error})") from None
            found.append(copy)
        yield found


def _copy(stream: IO[bytes], path: Path) -> None:
    with path.open("wb") as copy:
        shutil.copyfileobj(stream, copy, 1 << 20)
