# SPDX-License-Identifier: Apache-2.0
"""Help in two lengths: `--help` lists a command's everyday options in panels, `--help-all` every option."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from radixkv.cli.vllm_flags import refuse_vllm_flags

#: Panel -> its options by the names of their settings: the ones listed by `--help`, and the others.
PANELS: dict[str, tuple[str, str]] = {
    "Model": (
        "dtype device quantization gguf max_model_len chat_template",
        "attention_backend generation_config allow_download trust_remote_code seed warm_up",
    ),
    "Cache": (
        "kv_cache_memory state_memory window_memory kv_cache_dtype gpu_memory_utilization kv_tier",
        "enable_prefix_caching block_size num_blocks kv_events eviction_policy ghost_blocks pin_budget",
    ),
    "Adapters": (
        "lora lora_dir",
        "max_loras max_lora_rank",
    ),
    "Scheduling and speed": (
        "threads max_num_seqs deterministic speculation",
        "max_num_batched_tokens max_tokens_per_request max_queue scheduling_policy max_overtake "
        "namespace_weights max_draft_tokens share_prefix_attention async_scheduling request_timeout_s "
        "restart_engine",
    ),
    "Several engines": (
        "replicas tensor_parallel",
        "tensor_parallel_timeout_s ray_address",
    ),
    "Server": (
        "config_file host port served_model_names allowed_hosts allowed_origins",
        "unknown_fields header_timeout_s body_timeout_s keep_alive_s slow_client_timeout_s ping_interval_s "
        "shutdown_delay_s shutdown_grace_s console",
    ),
    "Keys and limits": (
        "api_keys admin_keys keys_file",
        "api_key_file max_body_bytes max_header_bytes max_json_depth max_json_parts max_messages max_prompts "
        "max_samples",
    ),
    "Chats and answers": (
        "chat_format response_store",
        "normalize_clients canonical_tools tools_first trust_request_chat_template "
        "structured_additional_properties max_stored_responses max_stored_bytes",
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
        """Parse arguments; flags that vLLM has in their place are refused with a hint."""
        refuse_vllm_flags(args, [option for param in self.params for option in param.opts])
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
