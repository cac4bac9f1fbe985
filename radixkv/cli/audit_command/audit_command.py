# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv audit`."""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from radixkv.cache.reporting.tree_walk import TreeSnapshot, TreeWalk
from radixkv.cli.audit_command.block_size import reported_block_size
from radixkv.cli.audit_command.input_files import readable_again
from radixkv.cli.audit_command.tables import print_report
from radixkv.cli.output_files import check_writable
from radixkv.engine.config import EngineConfig, parse_size
from radixkv.entrypoints.extras import require_engine
from radixkv.errors import ConfigError
from radixkv.observe.audit.prices import read_prices
from radixkv.observe.audit.prompt_units import PromptCoding, byte_coding
from radixkv.observe.audit.readers.recording import Recording
from radixkv.observe.audit.record import Json
from radixkv.observe.audit.report import AuditReport, request_json
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.observe.audit.request_rows import RequestRows
from radixkv.observe.audit.rule_sets import RULE_SETS, rule_set
from radixkv.observe.audit.rules import Rules
from radixkv.text.safe_text import without_surrogates

BYTES = "bytes"
EXAMPLE = "example_log.jsonl.gz"
_MIN_MEMORY = 16 << 20
_COLLECTED_AFTER = 200_000  # new objects
_SHOWN_TOKENS = 400  # of each node of the tree
_FORMS = (
    "as JSON lines with `request` and `response`, a HAR file or LiteLLM's log (`radixkv audit --example`)"
)


FilesArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILES...", help="Recorded requests, plain or gzipped; `-`: the standard input."),
]
RulesOption = Annotated[str, typer.Option(help=f"Whose rules say what is cached: {', '.join(RULE_SETS)}.")]
ToolsFirstOption = Annotated[
    bool,
    typer.Option(
        "--tools-first",
        help="Count as if tools came before the system prompt, as with `radixkv serve --tools-first`.",
    ),
]
CapacityOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens that the cache holds. Default: as many as come.")
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of a block or page of the engine. Default: as reported, else its own.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="The model that was served: prompts are counted in its tokens, by its template."),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="The same, by a tokenizer alone: a hub id, a folder or its tokenizer.json, or `bytes`: "
        "each byte of the text is a token."
    ),
]
MemoryOption = Annotated[str, typer.Option(help="Most memory for what is remembered of the log.")]
PrefillRateOption = Annotated[
    float | None,
    typer.Option(min=1e-3, help="Prompt tokens computed per second: says what misses cost in time."),
]
PricesOption = Annotated[
    str | None,
    typer.Option(help="A file of prices, or 'example': says what misses cost in money."),
]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the report to this JSON file.")
]
HtmlFileOption = Annotated[
    Path | None, typer.Option("--html", help="Also write the report as one page that works offline.")
]
ExampleOption = Annotated[
    bool, typer.Option("--example", help="Audit the recorded log that comes with radixkv.")
]


def audit_command(
    files: FilesArgument = None,
    rules: RulesOption = "radixkv",
    tools_first: ToolsFirstOption = False,
    capacity: CapacityOption = None,
    block_size: BlockSizeOption = None,
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    memory: MemoryOption = "512M",
    prefill_rate: PrefillRateOption = None,
    prices: PricesOption = None,
    json_file: JsonFileOption = None,
    html_file: HtmlFileOption = None,
    example: ExampleOption = False,
) -> None:
    """Find out why prompts miss the cache, from recorded requests to any provider or engine.

    Exits with 1 if nothing could be read of a file beside others, and with 2 if there is no report.
    """
    paths = list(files or ())
    if example:
        paths.append(Path(str(resources.files("radixkv.observe.audit").joinpath(EXAMPLE))))
    if not paths:
        raise ConfigError("audit: name files with recorded requests, or try `radixkv audit --example`")
    for flag, path in (("--json", json_file), ("--html", html_file)):
        check_writable(flag, path)
    size, chosen = parse_size(memory), rule_set(rules)
    if size < _MIN_MEMORY:
        raise ConfigError(f"--memory takes at least 16M, as in 512M or 2G; not {memory!r}")
    if tools_first and (model is not None or tokenizer is not None):
        raise ConfigError("--tools-first counts estimated tokens: leave --model and --tokenizer out")
    chosen = replace(chosen, tools_first=chosen.tools_first or tools_first)
    price_list = None if prices is None else read_prices(prices)
    coding = None if model is None and tokenizer is None else _coding_of(tokenizer or model or "")
    with readable_again(paths) as files, RequestRows() as rows:
        if chosen.block_tokens > 1 and block_size is None:
            block_size = reported_block_size(Recording(files, size // 4), chosen, coding)
        if block_size is not None:
            chosen = replace(chosen, block_tokens=block_size)
        report = AuditReport(chosen, prefill_rate, price_list)
        observer = Rules(chosen, coding, memory_bytes=size * 3 // 4, capacity_tokens=capacity)
        recording = Recording(files, size // 4)
        began = time.perf_counter()
        _observe(recording, observer, report, None if json_file is None else rows)
        result = without_surrogates({**_of_log(files, recording, observer), **report.to_dict()})
        result["summary"]["skipped_lines"] = recording.problems.count
        result["tokens_are"] = _counted(tokenizer, observer)
        result["seconds"] = round(time.perf_counter() - began, 3)
        if not report.num_requests and recording.unread:
            found = "; ".join(recording.unread[:3])
            raise ConfigError(f"audit: no request could be read. {found}. Expected are requests {_FORMS}")
        if not report.num_requests and not recording.problems.count:
            names = ", ".join(path.name for path in paths)
            raise ConfigError(f"audit: no request in {names}; expected one or more, {_FORMS}")
        if json_file is not None:
            _write_json(json_file, result, rows)
    if html_file is not None:
        from radixkv_server.console.offline_page import write_page  # heavy: FastAPI

        write_page(html_file, result, _tree_of(observer), observer.coding.unit_bytes)
    print_report(Console(), result)
    if recording.unread:
        print(f"radixkv: audit: nothing could be read of {'; '.join(recording.unread)}", file=sys.stderr)
        raise typer.Exit(1)


def _observe(recording: Recording, observer: Rules, report: AuditReport, rows: RequestRows | None) -> None:
    """Every request of the log in its order; unrenderable ones are counted as problems of the recording."""
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECTED_AFTER, *thresholds[1:])  # what is remembered of a log makes no cycles
    try:
        for record in recording:
            try:
                seen = observer.observe(record)
            except NoRequest as error:
                recording.problems.add(record.place, str(error))
                continue
            report.add(record, seen)
            if rows is not None:
                rows.add(record, without_surrogates(request_json(record, seen)))
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _coding_of(name: str) -> PromptCoding:
    """Return the counter of prompts in the tokens of a model.

    Raises:
        MissingPackageError: the base install can't.
        ModelLoadError: there is no such model, or its tokenizer can't be read.
    """
    if name == BYTES:
        return byte_coding()
    require_engine("radixkv audit --model")
    from radixkv.model.loading.loader import (  # heavy: torch or transformers
        load_image_processor,
        load_tokenizer,
        tokenizer_of_file,
    )
    from radixkv_server.recorded_prompts import ServedModelCoding

    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        folder = path.resolve().parent
        if not (folder / "tokenizer_config.json").is_file():
            return ServedModelCoding.of(tokenizer_of_file(path))
        name = str(folder)
    config = EngineConfig(model=name)
    return ServedModelCoding.of(load_tokenizer(config), load_image_processor(config))


def _counted(tokenizer: str | None, observer: Rules) -> str:
    if tokenizer == BYTES:
        return "bytes"
    return "exact" if observer.coding.is_exact else "estimated"


def _write_json(path: Path, result: Json, rows: RequestRows) -> None:
    """The report with all its requests."""
    rest = {name: value for name, value in result.items() if name != "requests"}
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(rest, indent=2).removesuffix("\n}") + ',\n  "requests": [')
            for number, text in enumerate(rows.texts()):
                file.write((",\n    " if number else "\n    ") + text)
            file.write("\n  ]\n}\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror or error}") from error


def _tree_of(observer: Rules) -> TreeSnapshot:
    walk = TreeWalk(observer.cache.tree, shown_tokens=_SHOWN_TOKENS)
    while walk.advance():
        pass
    return TreeSnapshot(walk.nodes(), walk.is_complete, True)


def _of_log(paths: list[Path], recording: Recording, observer: Rules) -> Json:
    """Print the facts about the log itself."""
    problems = recording.problems
    return {
        "files": [path.name for path in paths],
        "bytes": recording.num_bytes,
        "block_size": observer.rule_set.block_tokens,
        "broken": {
            "count": problems.count,
            "by_reason": dict(problems.by_reason.most_common(50)),
            "first": problems.named,
        },
        "skipped": recording.skipped,
        "forgotten": observer.num_forgotten,
    }


def add_commands(app: typer.Typer) -> None:
    """Mount the command on the main application."""
    app.command("audit")(audit_command)
