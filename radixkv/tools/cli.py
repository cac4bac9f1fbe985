"""The command line: `radixkv serve`, `chat`, `pull`, `explain`, `bench`, `replay`, `simulate`.

Every mistake of a user ends as one paragraph on standard error and a non-zero exit, without a traceback.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

import radixkv
from radixkv.config import EMBEDDED_MODEL, EngineConfig
from radixkv.engine.startup import resident_memory
from radixkv.errors import RadixKVError
from radixkv.tools.cli_options import engine_options

app = typer.Typer(
    name="radixkv",
    help="A prefix-caching LLM serving engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(radixkv.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("radixkv").setLevel(logging.DEBUG if verbose else logging.INFO)


def _banner(summary: Any, host: str, port: int, *, has_key: bool) -> str:
    """What a user wants to know when the server is ready; the curl line works when pasted."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    body = {
        "model": summary.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
    }
    # A key never goes to the screen or a log: the pasted line takes it from the environment.
    key = ' -H "Authorization: Bearer $RADIXKV_API_KEY"' if has_key else ""
    gib = summary.kv_bytes / 1024**3
    return "\n".join(
        [
            f"radixkv {radixkv.__version__} is ready on http://{shown}:{port}",
            f"  model      {summary.model} (up to {summary.max_model_len:,} tokens a request)",
            f"  backend    {summary.backend} on {summary.device}, {summary.dtype}",
            f"  KV cache   {summary.num_blocks:,} blocks of {summary.block_size} tokens: "
            f"{summary.kv_tokens:,} tokens, {gib:.2f} GiB",
            f"  memory     {resident_memory() / 1024**2:,.0f} MiB at rest; K/V takes more as it is used",
            f"  started    in {summary.phases}",
            "  try it     "
            f"curl http://{shown}:{port}/v1/chat/completions -H 'Content-Type: application/json'{key} "
            f"-d '{json.dumps(body)}'",
        ]
    )


@app.command()
@engine_options
def serve(
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel="Server")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0: any free one.", rich_help_panel="Server")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY or NAME=KEY; repeat for several. Each name is a namespace of its own in the cache. "
            "Also from RADIXKV_API_KEY.",
            rich_help_panel="Server",
        ),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY or NAME=KEY of an admin, who may look at and change what belongs to others or to all; "
            "repeat for several.",
            rich_help_panel="Server",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model in the API; repeat for several, the first of which answers carry.",
            rich_help_panel="Server",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further Host to accept besides this machine's, and pages from there; * for all; repeat "
            "for several.",
            rich_help_panel="Server",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin (as https://app.example) whose pages may call the server from a browser; * for all; "
            "repeat for several.",
            rich_help_panel="Server",
        ),
    ] = None,
    slow_client_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a client that takes nothing of its answer is given up.",
            rich_help_panel="Server",
        ),
    ] = 30.0,
    shutdown_delay: Annotated[
        float,
        typer.Option(
            help="Seconds for which the server still listens after SIGTERM, answering 503 to /health/ready "
            "and to new requests, so that load balancers see it.",
            rich_help_panel="Server",
        ),
    ] = 1.0,
    chat_format: Annotated[
        str,
        typer.Option(
            help="How the model writes reasoning and tool calls: auto (by its chat template), hermes, "
            "smollm2, smollm3, llama3, mistral, mistral-args, deepseek, harmony, or plain (all is content).",
            rich_help_panel="Server",
        ),
    ] = "auto",
    vllm_metrics: Annotated[
        bool,
        typer.Option(
            "--vllm-metrics",
            help="Give /metrics under vLLM's names, too, for its dashboards.",
            rich_help_panel="Server",
        ),
    ] = False,
    response_store: Annotated[
        str | None,
        typer.Option(
            help="SQLite file that keeps the answers of /v1/responses, for previous_response_id and "
            "retrieval; without it memory does, until the server ends.",
            metavar="FILE",
            rich_help_panel="Server",
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send OpenTelemetry traces there, as http://collector:4318/v1/traces (extra `otel`).",
            rich_help_panel="Server",
        ),
    ] = None,
) -> None:
    """Serve a model over the OpenAI-compatible HTTP API."""
    from radixkv_server.app import check_port_is_free, serve_engine
    from radixkv_server.settings import make_settings

    settings = make_settings(
        host=host,
        port=port,
        api_keys=api_key,
        admin_keys=admin_key,
        served_model_names=served_model_name,
        allowed_hosts=allowed_host,
        allowed_origins=allowed_origin,
        slow_client_timeout_s=slow_client_timeout,
        shutdown_delay_s=shutdown_delay,
        chat_format=chat_format,
        vllm_metrics=vllm_metrics,
        response_store=response_store,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    check_port_is_free(host, port)
    console = Console(stderr=True)
    console.print(f"Loading {config.model} ...", highlight=False)
    engine = radixkv.AsyncEngine.from_config(config)

    def ready(host: str, port: int) -> None:
        has_key = settings.first_api_key is not None
        engine.summary.phases.ends_now("server")
        print(_banner(engine.summary, host, port, has_key=has_key), flush=True)

    serve_engine(engine, settings, on_ready=ready)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Embedded model or hub id.")] = EMBEDDED_MODEL,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Fetch its Python code, too; nothing is run."),
    ] = False,
) -> None:
    """Fetch (and convert) a model ahead of time; print its folder."""
    from radixkv.model.loading.loader import pull as pull_model

    print(pull_model(name, trust_remote_code=trust_remote_code))


@functools.cache
def command_tree() -> typer.Typer:
    """All commands, those included that live with what they run."""
    from radixkv.tools.bench import cli as bench
    from radixkv.tools.chat import cli as chat
    from radixkv.tools.explain import cli as explain
    from radixkv.tools.replay import cli as replay

    for commands in (chat, explain, bench, replay):
        commands.add_commands(app)
    return app


def main() -> None:
    """Entry point of the `radixkv` command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command_tree()()
    except RadixKVError as error:
        print(f"radixkv: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
