# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv proxy`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from radixkv.cli.output_files import check_writable
from radixkv.engine.config import parse_size
from radixkv.errors import ConfigError
from radixkv.observe.audit.prices import read_prices
from radixkv.observe.audit.rule_sets import rule_set


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    app.command(name="proxy")(proxy)


UpstreamOption = Annotated[
    list[str],
    typer.Option(
        metavar="URL[,events=tcp://HOST:PORT]",
        help="The server to hand requests on to, as https://api.openai.com. Of several, each request goes"
        " to the one that is expected to answer soonest, by the block events it publishes or by what was "
        "sent there.",
    ),
]
HostOption = Annotated[str, typer.Option(help="Address to listen on; others than loopback are open to all.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")]
RecordOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append each request and its answer, for `radixkv audit`; never keys."),
]
RedactOption = Annotated[
    bool, typer.Option("--redact", help="With --record: hashes of words in the place of texts.")
]
RecordSizeOption = Annotated[
    str, typer.Option(metavar="SIZE", help="A longer record becomes FILE.1, and another one begins.")
]
RecordFilesOption = Annotated[int, typer.Option(min=1, help="So many of them are kept.")]
ConsolePortOption = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Show the console there: the tree of prompts, and each request."),
]
RulesOption = Annotated[
    str,
    typer.Option(help="What should be found: radixkv, vllm, sglang, anthropic or openai; auto: by the name."),
]
PricesOption = Annotated[
    str | None,
    typer.Option(help="A file of prices, or 'example': the console says what prompts cost."),
]
MemoryOption = Annotated[str, typer.Option(metavar="SIZE", help="For what the console remembers of prompts.")]
MaxBodyOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Refuse longer request bodies; default: any length.")
]
MaxKeptOption = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Of a request or answer above this nothing is recorded or shown."),
]


def proxy(
    upstream: UpstreamOption,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    record: RecordOption = None,
    redact: RedactOption = False,
    record_size: RecordSizeOption = "256MiB",
    record_files: RecordFilesOption = 8,
    console_port: ConsolePortOption = None,
    rules: RulesOption = "auto",
    prices: PricesOption = None,
    memory: MemoryOption = "512MiB",
    max_body: MaxBodyOption = None,
    max_kept: MaxKeptOption = "32MiB",
) -> None:
    """Stand before any model API, forward everything unchanged, and show and record the requests.

    Clients are given http://HOST:PORT in the place of the API's own address. Keys go through and are kept
    nowhere.
    """
    from radixkv_server.proxy.fleet import Fleet, FleetMember  # heavy: FastAPI
    from radixkv_server.proxy.observer import ObserverSettings
    from radixkv_server.proxy.serve import ProxySettings, serve
    from radixkv_server.proxy.upstream import Upstream

    if console_port is not None:
        _check_port(host, console_port)
    if redact and record is None:
        raise ConfigError("--redact is for what --record writes: give its FILE")
    check_writable("--record", record)
    logging.getLogger("radixkv_server").setLevel(logging.INFO)
    target: Upstream | Fleet
    if len(upstream) == 1 and ",events=" not in upstream[0]:
        target = Upstream.parse(upstream[0])
    else:
        target = Fleet([FleetMember.parse(text) for text in upstream])
    settings = ProxySettings(
        target,
        host,
        port,
        None if max_body is None else parse_size(max_body),
        parse_size(max_kept),
    )
    observing = ObserverSettings(
        record=None if record is None else record.absolute(),
        redact=redact,
        record_bytes=parse_size(record_size),
        record_files=record_files,
        redaction_key=secrets.token_bytes(32),
        rules=rule_set(_rules_of(settings.upstream.host) if rules == "auto" else rules).name,
        host=host,
        console_port=console_port,
        memory_bytes=parse_size(memory),
        prices=None if prices is None else read_prices(prices),
        max_body_bytes=parse_size(max_kept),
    )

    def ready(opened: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{opened} hands on to {settings.upstream}", flush=True)
        if console_port is not None:
            print(f"  console  http://{shown}:{console_port}/ ({observing.rules} rules)", flush=True)
        if record is not None:
            print(f"  record   {record}{', texts as hashes' if redact else ''}", flush=True)

    asyncio.run(serve(settings, observing, ready))


def _rules_of(host: str) -> str:
    """Return the rules of a provider by its name; for all others, the rules of a prefix cache."""
    return next((name for name in ("anthropic", "openai") if name in host.lower()), "radixkv")


def _check_port(host: str, port: int) -> None:
    """The observer, which opens it, is a process of its own and can't tell."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigError(
            f"--console-port: can't listen on {host}:{port}: {error.strerror or error}"
        ) from error
