# SPDX-License-Identifier: Apache-2.0
"""`radixkv serve` and `radixkv key`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.console import Console

import radixkv
from radixkv.cli.brief_help import PANEL_OF, BriefHelp
from radixkv.cli.options import engine_options, settings_options, settings_parameters
from radixkv.engine.config import EngineConfig
from radixkv.engine.interpreter import no_collections
from radixkv.entrypoints.extras import require_engine
from radixkv.errors import ConfigError
from radixkv_server.log_format import configure_logging
from radixkv_server.ray_serve.settings import ReplicaSettings
from radixkv_server.settings import ServerSettings, make_settings
from radixkv_server.tenants.api_keys import TENANT_NAME, new_secret, parse_api_key, stored_form

SERVER_PANEL = "Server"
REPLICA_PANEL = "Replicas"

_RENAMED = {
    "api_keys": "--api-key",
    "admin_keys": "--admin-key",
    "served_model_names": "--served-model-name",
    "allowed_hosts": "--allowed-host",
    "allowed_origins": "--allowed-origin",
    "trust_request_chat_template": "--trust-request-chat-template",
    "console": "--console/--no-console",
    "access_log": "--access-log/--no-access-log",
    "canonical_tools": "--canonical-tools",
    "tools_first": "--tools-first",
    "vllm_metrics": "--vllm-metrics",
    "image_urls": "--image-urls",
    # Times are in seconds, by name and not by letter.
    **{
        item.name: "--" + item.name.removesuffix("_s").replace("_", "-")
        for item in fields(ServerSettings)
        if item.name.endswith("_s")
    },
}


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a typer command the settings of the server as options.

    The command must take `settings: ServerSettings`; its other parameters stay as they are.
    """
    options = settings_parameters(ServerSettings, SERVER_PANEL, renamed=_RENAMED)
    option = typer.Option(
        help="File with such keys, one KEY or NAME=KEY a line; unlike a flag, no list of processes shows it.",
        rich_help_panel=PANEL_OF["api_key_file"],
    )
    key_file = inspect.Parameter(
        "api_key_file",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
    return settings_options(command, "settings", make_settings, [*options, key_file])


def _banner(summary: Any, host: str, port: int, *, has_key: bool) -> str:
    """Print the address, the console and a request to try; the curl line works when pasted."""
    from radixkv.engine.startup import resident_memory  # heavy: torch or transformers

    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    body = {
        "model": summary.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    # A key never goes to the screen or a log: the pasted line takes it from the environment.
    key = ' -H "Authorization: Bearer $RADIXKV_API_KEY"' if has_key else ""
    gib = summary.kv_bytes / 1024**3
    sampling = ", ".join(f"{name} {value}" for name, value in summary.sampling.items())
    memory = resident_memory() / 1024**2
    return "\n".join(
        [
            f"radixkv {radixkv.__version__} is ready on http://{shown}:{port}",
            f"  model      {summary.model} (up to {summary.max_model_len:,} tokens a request)",
            f"  sampling   {sampling} where a request gives none (from {summary.sampling_source})",
            f"  backend    {summary.backend} on {summary.device}, {summary.dtype}",
            f"  KV cache   {summary.num_blocks:,} blocks of {summary.block_size} tokens: "
            f"{summary.kv_tokens:,} tokens, {gib:.2f} GiB",
            *_states_line(summary),
            f"  memory     {memory:,.0f} MiB at rest; K/V takes more as it is used",
            f"  started    in {summary.phases}",
            "  try it     "
            f"curl http://{shown}:{port}/v1/chat/completions -H 'Content-Type: application/json'{key} "
            f"-d '{json.dumps(body)}'",
        ]
    )


def _states_line(summary: Any) -> list[str]:
    lines = []
    if summary.num_window_blocks:
        gib, size = summary.window_bytes / 1024**3, summary.block_size
        lines.append(f"  windows    {summary.num_window_blocks:,} blocks of {size} tokens, {gib:.2f} GiB")
    if summary.num_states:
        gib = summary.state_bytes / 1024**3
        lines.append(f"  states     {summary.num_states:,} with what running requests add, {gib:.2f} GiB")
    return lines


def replica_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a typer command, which takes `replica_settings`, the settings of replicas as options."""
    options = settings_parameters(ReplicaSettings, REPLICA_PANEL, renamed={})
    return settings_options(command, "replica_settings", ReplicaSettings, options)


@engine_options
@server_options
@replica_options
def serve(config: EngineConfig, settings: ServerSettings, replica_settings: ReplicaSettings) -> None:
    """Serve a model over the OpenAI-compatible HTTP API."""
    require_engine("radixkv serve")
    from radixkv.entrypoints.check_start import check_start  # it needs what the extras bring

    if replica_settings.ray_address is None:  # a cluster's machines have files of their own
        check_start(config, fetch=True)
    with no_collections():
        from radixkv_server.app import check_port_is_free, serve_engine, with_tenants  # heavy: FastAPI

    configure_logging(settings.log_format, settings.log_level)
    if replica_settings.ray_address is None:  # a cluster's Ray Serve may listen already
        check_port_is_free(settings.host, settings.port)
    console = Console(stderr=True)
    if replica_settings.replicas is not None:
        from radixkv_server.ray_serve.serve import serve_replicas  # heavy: FastAPI

        console.print(f"Starting {replica_settings.replicas} x {config.model} ...", highlight=False)
        serve_replicas(
            config,
            settings,
            replica_settings,
            on_ready=lambda host, port: print(
                f"{replica_settings.replicas} replicas of {config.model} at http://{host}:{port}", flush=True
            ),
        )
        return
    console.print(f"Loading {config.model} ...", highlight=False)
    with no_collections():  # while the engine is imported
        engine = radixkv.AsyncEngine.from_config(with_tenants(config, settings))

    def ready(host: str, port: int) -> None:
        engine.summary.phases.ends_now("server")
        print(_banner(engine.summary, host, port, has_key=settings.asks_for_keys), flush=True)

    serve_engine(engine, settings, on_ready=ready)


key_app = typer.Typer(help="API keys for `radixkv serve`.", invoke_without_command=True)


@key_app.callback()
def key(
    context: typer.Context,
    admin: Annotated[bool, typer.Option("--admin", help="The tenant is an admin.")] = False,
) -> None:
    """Make an API key: without a further command for the tenant `user`, or `admin` with --admin."""
    if context.invoked_subcommand is None:
        new_key("admin" if admin else "user", admin)


@key_app.command("new")
def new_key(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.")],
    admin: Annotated[bool, typer.Option("--admin", help="The tenant is an admin.")] = False,
) -> None:
    """Make an API key: it is shown this once, the lines for the keys file hold only its hash."""
    if not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(
            f"{tenant[:80]!r} is no name of a tenant: a letter, then at most 63 letters, digits, _ . and -"
        )
    secret = new_secret()
    table = tenant if "." not in tenant else f'"{tenant}"'
    print(f"the key, shown only now: {secret}")
    print("for the keys file:")
    print(f"[tenants.{table}]")
    if admin:
        print('role = "admin"')
    print(f'keys = ["{stored_form(secret)}"]')


@key_app.command("hash")
def hash_key() -> None:
    """Read a key from standard input and print the form that the keys file holds."""
    secret = sys.stdin.readline().strip()
    parse_api_key(f"tenant={secret}")  # refuses what no request could present
    print(f'"{stored_form(secret)}"')


def add_commands(app: typer.Typer) -> None:
    """Give the command line `serve` and `key`."""
    app.command(cls=BriefHelp)(serve)
    app.add_typer(key_app, name="key")
    app.add_typer(key_app, name="keys", hidden=True)  # its name until version 0.2
