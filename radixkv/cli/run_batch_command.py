# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv run-batch`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from radixkv.cli.brief_help import BriefHelp
from radixkv.cli.options import engine_options
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.extras import require_engine
from radixkv.errors import ConfigError, EngineStoppedError
from radixkv_server.batches.lines import InputFile, OutputFile
from radixkv_server.batches.runner import BatchCounts, BatchRunner
from radixkv_server.settings import ServerSettings

if TYPE_CHECKING:
    from radixkv.entrypoints.async_engine import AsyncEngine


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    app.command(name="run-batch", cls=BriefHelp)(run_batch)


@partial(engine_options, model_flag=True)
def run_batch(
    config: EngineConfig,
    requests_file: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl", help="A request a line: custom_id, url and body, as OpenAI's batches."
        ),
    ],
    answers_file: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="An answer a line; lines that are there are kept.")
    ],
    served_model_names: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="Names that requests may use; default: the model's own."),
    ] = None,
) -> None:
    """Answer a file of requests, in the order of their shared prefixes.

    A prefix that many lines share is computed once, also where all prefixes together are larger than the
    cache. A bad line gets an error line. After an interruption the same command goes on.
    """
    if requests_file.resolve() == answers_file.resolve():
        raise ConfigError(f"{answers_file} is the file of requests; name another file for the answers")
    require_engine("radixkv run-batch")
    with (
        contextlib.closing(InputFile(requests_file)) as requests,
        contextlib.closing(OutputFile(answers_file, requests)) as answers,
    ):
        _answer(config, requests, answers, tuple(served_model_names or ()))


def _answer(
    config: EngineConfig, requests: InputFile, answers: OutputFile, served_model_names: tuple[str, ...]
) -> None:
    console = Console(stderr=True)
    if len(answers.done) == len(requests.places):
        console.print(f"all {len(answers.done):,} lines have their answer in {answers.path}", highlight=False)
        return
    # What follows needs torch.
    from radixkv.entrypoints.async_engine import AsyncEngine
    from radixkv.entrypoints.check_start import check_start

    check_start(config, fetch=True)
    console.print(f"Loading {config.model} ...", highlight=False)
    engine = AsyncEngine.from_config(config)
    try:
        settings = ServerSettings(served_model_names=served_model_names, access_log=False, console=False)
        counts = asyncio.run(_run(engine, settings, requests, answers, console))
    except KeyboardInterrupt:
        console.print(
            f"{len(answers.done):,} of {len(requests.places):,} lines are done; the same command goes on",
            highlight=False,
        )
        sys.exit(130)
    stats = engine.stats()
    console.print(
        f"{counts.answered:,} answered, {counts.failed:,} refused; {stats.cached_prompt_tokens:,} of "
        f"{stats.prompt_tokens:,} prompt tokens were cached",
        highlight=False,
    )


async def _run(
    engine: AsyncEngine, settings: ServerSettings, requests: InputFile, answers: OutputFile, console: Console
) -> BatchCounts:
    from radixkv_server.app import create_app  # with all routes: a second that a refused file need not wait

    app = create_app(engine, settings)
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None)
    async with engine, app.router.lifespan_context(app), client:
        with _progress(console) as progress:
            runner = BatchRunner(
                client,
                max_concurrent=2 * engine.config.max_num_seqs,
                is_healthy=lambda: engine.is_healthy,
                on_progress=_ShownProgress(progress, engine).show,
            )
            try:
                return await runner.run(requests, answers)
            except* (ConfigError, EngineStoppedError) as failed:
                raise failed.exceptions[0] from failed


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=console,
    )


class _ShownProgress:
    """Bars for ordering and answering; the second with the rate and the share of prompts that was cached."""

    def __init__(self, progress: Progress, engine: AsyncEngine) -> None:
        self._progress = progress
        self._engine = engine
        self._ordering: TaskID | None = None
        self._answering: TaskID | None = None

    def show(self, counts: BatchCounts) -> None:
        if self._ordering is None:
            self._ordering = self._progress.add_task("ordering ", total=counts.total, figures="")
        self._progress.update(self._ordering, completed=counts.ordered)
        if counts.ordered < counts.total:
            return
        if self._answering is None:
            self._answering = self._progress.add_task("answering", total=counts.total, figures="")
        stats = self._engine.stats()
        share = stats.cached_prompt_tokens / max(1, stats.prompt_tokens)
        speed = self._progress.tasks[self._answering].speed or 0.0
        self._progress.update(
            self._answering, completed=counts.ended, figures=f"{speed:.1f} /s, {share:.0%} of prompts cached"
        )
