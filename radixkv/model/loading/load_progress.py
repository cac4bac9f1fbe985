# SPDX-License-Identifier: Apache-2.0
"""Progress of long work at start-up: a bar on a terminal, a line per quarter elsewhere (logs, CI)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

#: Sets how much of the total is done, in the total's unit.
Update = Callable[[float], None]


def _plain(label: str, total: float, patience: float) -> Update:
    """Print a line for each quarter of the work that is done, `patience` seconds apart at least."""
    shown, started, last = 0, time.monotonic(), 0.0
    if not patience:
        print(f"{label} ...", file=sys.stderr, flush=True)

    def update(done: float) -> None:
        nonlocal shown, last
        quarter = int(4 * min(done / max(total, 1.0), 1.0))
        seconds = time.monotonic() - started
        # The end of what has been shown is shown, too.
        if quarter > shown and (seconds - last >= patience or (shown and quarter == 4)):
            shown, last = quarter, seconds
            print(f"{label} ... {25 * quarter} % ({seconds:.0f} s)", file=sys.stderr, flush=True)

    return update


@contextmanager
def progress_bar(
    label: str, total: float, *, unit: str = "bytes", show: bool = True, patience: float = 0.0
) -> Iterator[Update]:
    """Show the progress of one task on stderr until the block ends; completed on a normal end.

    Args:
        label: name of the work, e.g. `Fetching smollm2-135m-instruct`.
        total: amount of work.
        unit: `bytes` (shown as MB and MB/s) or any other word (shown as a percentage).
        show: False shows nothing.
        patience: seconds between the lines of a log, and before the first one.
    """
    if not show:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        update = _plain(label, total, patience)
        yield update
        update(total)
        return
    from rich.console import Console  # slow to import
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


@contextmanager
def counted_weights(report: Update) -> Iterator[None]:
    """Report the share of weights that transformers has read, in place of its own bar, within the block."""
    from transformers.utils import logging  # heavy

    def counted(bar: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if len(args) != 1 or not isinstance(args[0], Collection):  # not the bar of the weights
            return bar(*args, **keywords)
        return shares(args[0])

    def shares(items: Collection[Any]) -> Iterator[Any]:
        for index, item in enumerate(items):
            report(index / len(items))
            yield item

    previous = logging.set_tqdm_hook(counted)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)
