# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv explain`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from radixkv.cli.brief_help import BriefHelp
from radixkv.cli.explain_local import LocalCache
from radixkv.cli.openai_http import api_root, authorization, body_of, read_key
from radixkv.cli.options import engine_options
from radixkv.cli.output_files import check_writable, write_json
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, RequestFailedError
from radixkv.text.safe_text import printable, without_surrogates

SHOWN_CHARS = 160


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    app.command(name="explain", cls=BriefHelp)(explain)


@partial(engine_options, model_flag=True)
def explain(
    config: EngineConfig,
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prompts: texts, chats as JSON (a list of messages), or bodies of requests."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option("--prompt", help="The same as FILES; may be repeated.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask this running server, as http://127.0.0.1:8000.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key for --url; else it is taken from RADIXKV_API_KEY."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the reports here.")] = None,
) -> None:
    """Say how much of each prompt would come from the cache, and show the text where the rest begins.

    With --url a running server is asked about its cache; nothing is sent to its model. Without,
    the prompts are taken as sent one after the other to an empty cache; no model is loaded.
    """
    paths = [*(files or ()), *(prompt_file or ())]
    if not paths:
        raise ConfigError("give at least one file with a prompt")
    if url is None and api_key_file is not None:
        raise ConfigError("--api-key-file is for a server: give its --url")
    if url is not None and config != EngineConfig():
        raise ConfigError(
            "--url asks a server that runs with settings of its own: leave the engine's options"
        )
    check_writable("--json", json_file)
    prompts = [(path, read_prompt(path)) for path in paths]
    if url is None:
        cache = LocalCache(config)
        reports = [cache.explain(path, prompt) for path, prompt in prompts]
    else:
        key = read_key(api_key_file)
        reports = [_explain_remotely(url, key, path, prompt) for path, prompt in prompts]
    reports = without_surrogates(reports)
    for path, report in zip(paths, reports, strict=True):
        print("\n".join(lines_of(path, report)))
    write_json(
        json_file, [{"file": str(path), **report} for path, report in zip(paths, reports, strict=True)]
    )


def _explain_remotely(url: str, key: str | None, path: Path, prompt: dict[str, Any]) -> dict[str, Any]:
    """Return the server's explanation of a prompt; see docs/cache_api.md."""
    address = api_root(url) + "/v1/cache/explain"
    try:
        answer = httpx.post(address, json=prompt, headers=authorization(key), timeout=60, trust_env=False)
        return body_of(answer)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url} does not answer: {error or type(error).__name__}") from error
    except RequestFailedError as error:
        raise ConfigError(f"{url} does not explain {path}: {error}") from None


def lines_of(path: Path, report: dict[str, Any]) -> list[str]:
    """Return a report in lines for people."""
    if "with_tokens" in report:
        first = f"{report['shared_tokens']} of {report['prompt_tokens']} tokens are shared."
    else:
        first = (
            f"{report['cached_tokens']} of {report['prompt_tokens']} tokens are cached: {report['reason']}."
        )
    lines = [f"{printable(str(path))}: {first}"]
    around = report.get("around")
    if around is not None:
        lines.append(f"  at token {around['position']}")
        shown = {name: around.get(name) for name in ("before", "prompt", "cached", "with")}
        for name, text in shown.items():
            if text:
                lines.append(f"  {name:<8} {_shown(text, is_end=name == 'before')}")
    if report.get("advice"):
        lines.append(f"  {printable(report['advice'])}")
    return lines


def _shown(text: str, *, is_end: bool) -> str:
    """Return the end or the beginning of a text, in quotes, on one line."""
    cut = text[-SHOWN_CHARS:] if is_end else text[:SHOWN_CHARS]
    more = "..." if len(cut) < len(text) else ""
    quoted = printable(json.dumps(cut, ensure_ascii=False))
    return more + quoted if is_end else quoted + more


_PROMPTS = ("messages", "prompt", "compare")


def read_prompt(path: Path) -> dict[str, Any]:
    """Read the fields of a request from a file: JSON, a list of messages, or plain text.

    Raises:
        ConfigError: the file can't be read, is empty, or is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); "
            "give a text file or a chat as JSON"
        ) from None
    if not text:
        raise ConfigError(f"{path} is empty")
    return _chat_of(text) or {"prompt": text}


def _chat_of(text: str) -> dict[str, Any] | None:
    """Return the request that a text has as JSON; None: it is plain text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and any(name in value for name in _PROMPTS):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return {"messages": value}
    return None
