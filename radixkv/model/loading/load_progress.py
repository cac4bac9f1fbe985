"""Progress of long work at start-up: a rich bar on a terminal, a line per quarter elsewhere (logs, CI)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class ProgressBar(Protocol):
    """One running task."""

    def update(self, done: float) -> None:
        """Set how much of the total is done, in the total's unit."""


class _PlainBar:
    """Prints a line when a quarter of the work is done: what a log file can show of progress."""

    def __init__(self, label: str, total: float) -> None:
        self._label = label
        self._total = max(total, 1.0)
        self._next_quarter = 1
        self._started = time.monotonic()
        print(f"{label} ...", file=sys.stderr, flush=True)

    def update(self, done: float) -> None:
        quarter = int(4 * min(done / self._total, 1.0))
        if quarter >= self._next_quarter:
            self._next_quarter = quarter + 1
            seconds = time.monotonic() - self._started
            print(f"{self._label} ... {25 * quarter} % ({seconds:.0f} s)", file=sys.stderr, flush=True)


class _RichBar:
    def __init__(self, progress: object, task: object, total: float) -> None:
        self._progress = progress
        self._task = task
        self._total = total

    def update(self, done: float) -> None:
        self._progress.update(self._task, completed=min(done, self._total))  # type: ignore[attr-defined]


@contextmanager
def progress_bar(
    label: str, total: float, *, unit: str = "bytes", show: bool = True
) -> Iterator[ProgressBar]:
    """Show the progress of one task on stderr until the block ends; completed on a normal end.

    Args:
        label: what is being done, e.g. `Fetching smollm2-135m-instruct`.
        total: amount of work.
        unit: `bytes` (shown as MB and MB/s) or any other word (shown as a percentage).
        show: False shows nothing.
    """
    if not show:
        yield _SilentBar()
        return
    if not sys.stderr.isatty():
        bar = _PlainBar(label, total)
        yield bar
        bar.update(total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = [TextColumn("{task.description}"), BarColumn()]
    if unit == "bytes":
        columns += [DownloadColumn(), TransferSpeedColumn()]
    else:
        columns += [TaskProgressColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        rich_bar = _RichBar(progress, task, total)
        yield rich_bar
        rich_bar.update(total)


class _SilentBar:
    def update(self, done: float) -> None:
        """Show nothing."""
