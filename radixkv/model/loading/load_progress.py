"""Progress of long work at start-up: a rich bar on a terminal, a line per quarter elsewhere (logs, CI)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Sets how much of the total is done, in the total's unit.
Update = Callable[[float], None]


def _plain(label: str, total: float) -> Update:
    """Prints a line when a quarter of the work is done: what a log file can show of progress."""
    shown, started = 0, time.monotonic()
    print(f"{label} ...", file=sys.stderr, flush=True)

    def update(done: float) -> None:
        nonlocal shown
        quarter = int(4 * min(done / max(total, 1.0), 1.0))
        if quarter > shown:
            shown, seconds = quarter, time.monotonic() - started
            print(f"{label} ... {25 * quarter} % ({seconds:.0f} s)", file=sys.stderr, flush=True)

    return update


@contextmanager
def progress_bar(label: str, total: float, *, unit: str = "bytes", show: bool = True) -> Iterator[Update]:
    """Show the progress of one task on stderr until the block ends; completed on a normal end.

    Args:
        label: what is being done, e.g. `Fetching smollm2-135m-instruct`.
        total: amount of work.
        unit: `bytes` (shown as MB and MB/s) or any other word (shown as a percentage).
        show: False shows nothing.
    """
    if not show:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        update = _plain(label, total)
        yield update
        update(total)
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
        yield lambda done: progress.update(task, completed=min(done, total))
        progress.update(task, completed=total)
