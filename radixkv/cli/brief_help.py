# SPDX-License-Identifier: Apache-2.0
"""Help in two lengths: `--help` lists a command's everyday options in panels, `--help-all` every option."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from radixkv.cli.unknown_flags import refuse_unknown_flags

#: Panel -> its options by the names of their settings: the ones listed by `--help`, and the others.
PANELS: dict[str, tuple[str, str]] = {
    "Model": (
        "dtype device quantization gguf max_model_len chat_template",
        "generation_config allow_download trust_remote_code seed warm_up",
    ),
    "Cache": (
        "kv_cache_memory state_memory window_memory kv_cache_dtype gpu_memory_utilization kv_tier",
        "enable_prefix_caching block_size num_blocks kv_events eviction_policy",
    ),
    "Adapters": (
        "lora lora_dir",
        "",
    ),
    "Scheduling and speed": (
        "threads max_num_seqs deterministic speculation",
        "max_num_batched_tokens scheduling_policy",
    ),
    "Several engines": (
        "replicas tensor_parallel",
        "ray_address",
    ),
    "Server": (
        "host port served_model_names allowed_hosts allowed_origins",
        "shutdown_delay_s shutdown_grace_s console",
    ),
    "Keys": (
        "api_keys admin_keys keys_file",
        "api_key_file",
    ),
    "Chats and answers": (
        "chat_format response_store",
        "images image_urls normalize_clients canonical_tools tools_first trust_request_chat_template",
    ),
    "Logs and metrics": (
        "log_level access_log",
        "log_format vllm_metrics otlp_traces_endpoint",
    ),
}
PANEL_OF = {name: panel for panel, lists in PANELS.items() for names in lists for name in names.split()}
EVERYDAY = frozenset(name for everyday, _ in PANELS.values() for name in everyday.split())


_ALL = "radixkv: all options"


class BriefHelp(TyperCommand):
    """A command with many options: `--help` leaves the rare ones to `--help-all`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        order = ["", *PANELS]
        self.params.sort(key=lambda param: _place(order, getattr(param, "rich_help_panel", None)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; settings without a flag and other engines' flags are refused with a hint."""
        known = [option for param in self.params for option in (*param.opts, *param.secondary_opts)]
        refuse_unknown_flags(args, known)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text; options that have a panel and are no everyday ones only for `--help-all`."""
        rare = [
            param
            for param in self.params
            if isinstance(param, TyperOption) and param.rich_help_panel and param.name not in EVERYDAY
        ]
        for param in rare:
            param.hidden = not ctx.meta.get(_ALL)
        try:
            super().format_help(ctx, formatter)
        finally:
            for param in rare:
                param.hidden = False  # shells complete them


def _place(order: list[str], panel: str | None) -> int:
    return order.index(panel or "") if (panel or "") in order else len(order)


def _print_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


#: The parameter that commands of this class have besides their own.
HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--help-all", is_eager=True, callback=_print_all, help="Show every option and exit."),
    ],
)
