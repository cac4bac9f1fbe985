# SPDX-License-Identifier: Apache-2.0
"""The commands `radixkv cache ls`, `verify` and `clear`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radixkv.cli.output_files import check_writable, write_json
from radixkv.errors import ConfigError
from radixkv.tiers.disk.folder import LOCK, FolderLock, files_in, process_using
from radixkv.tiers.disk.reports import SegmentReport, clear, report_segments

FolderArgument = Annotated[
    Path, typer.Argument(help="The folder, as after `--kv-tier disk:`.", metavar="PATH")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]

app = typer.Typer(
    help="Look at the folder of `--kv-tier disk:PATH`, check it, or empty it.", no_args_is_help=True
)


@app.command("ls")
def list_files(folder: FolderArgument, json_file: JsonOption = None) -> None:
    """List the files, the oldest first: their blocks, tokens, bytes and model.

    The blocks' contents are not read. The folder may be in use.
    """
    check_writable("--json", json_file)
    _print(folder, _reports(folder, verify=False), json_file)


@app.command()
def verify(folder: FolderArgument, json_file: JsonOption = None) -> None:
    """Read every block and check it; exit status 1 if any is damaged.

    A folder may be in use; a block being written looks damaged then.
    """
    check_writable("--json", json_file)
    reports = _reports(folder, verify=True)
    _print(folder, reports, json_file)
    if not all(report.is_sound for report in reports):
        raise typer.Exit(1)


@app.command("clear")
def clear_folder(folder: FolderArgument) -> None:
    """Remove all blocks. Refused while a server uses the folder; other files in it stay."""
    _check(folder)
    lock = FolderLock(folder)
    try:
        with _named_os_errors(folder):
            num_bytes = clear(folder)
    finally:
        lock.release()
    print(f"removed {num_bytes:,} bytes from {folder}")


def add_commands(commands: typer.Typer) -> None:
    """Put the commands into the command line's `commands`."""
    commands.add_typer(app, name="cache")


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the one after `--kv-tier disk:`")
    with _named_os_errors(folder):
        if not (folder / LOCK).exists() and not files_in(folder):
            raise ConfigError(f"{folder} is no folder of a K/V tier: it has neither blocks nor a lock")


@contextlib.contextmanager
def _named_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from error


def _reports(folder: Path, *, verify: bool) -> list[SegmentReport]:
    _check(folder)
    reports = []
    with (
        _named_os_errors(folder),
        Progress(console=Console(stderr=True), disable=not verify, transient=True) as bar,
    ):
        task = bar.add_task("Reading", total=len(files_in(folder)))
        for report in report_segments(folder, verify=verify):
            reports.append(report)
            bar.advance(task)
    return reports


def _print(folder: Path, reports: Sequence[SegmentReport], json_file: Path | None) -> None:
    table = Table("file", "blocks", "tokens", "bytes", "written", "model", "damage", box=None)
    for report in reports:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.modified))
        figures = (report.num_records, report.num_tokens, report.num_bytes)
        model = f"{report.model} {report.fingerprint[:8]}".strip()
        table.add_row(report.file, *(f"{figure:,}" for figure in figures), written, model, _damage(report))
    Console(width=160).print(table, highlight=False)
    total = _total(folder, reports)
    print(
        f"{total['records']:,} blocks of {total['tokens']:,} tokens, {total['bytes']:,} bytes; "
        f"{total['damaged']:,} damaged, {total['lost_bytes']:,} bytes lost"
        + (f"; in use by process {total['process']}" if total["process"] else "")
    )
    write_json(json_file, {"summary": total, "files": [asdict(report) for report in reports]})


def _damage(report: SegmentReport) -> str:
    parts = [f"{len(report.damaged)} blocks"] if report.damaged else []
    parts += [f"{report.lost_bytes:,} bytes at the end"] if report.lost_bytes else []
    parts += ["another version's"] if report.is_foreign else []
    return ", ".join(parts)


def _total(folder: Path, reports: Sequence[SegmentReport]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "process": process_using(folder),
        "records": sum(report.num_records for report in reports),
        "tokens": sum(report.num_tokens for report in reports),
        "bytes": sum(report.num_bytes for report in reports),
        "damaged": sum(len(report.damaged) for report in reports),
        "lost_bytes": sum(report.lost_bytes for report in reports),
    }
