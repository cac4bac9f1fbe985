# SPDX-License-Identifier: Apache-2.0
"""Errors for options by names that nothing here has: the nearest one, or what another engine's name is here.

vLLM's names (and some of transformers', SGLang's and llama.cpp's) are data below, each with what to write
instead. One decorator checks the names of a call or of a class's constructor. Flags of the command line are
looked up in the same table as options of `LLM`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from radixkv.errors import ConfigError, InvalidRequestError

Target = TypeVar("Target", bound=Callable[..., Any])

#: Table of the configuration file of `radixkv serve` -> the settings that have their place there and no flag.
#: In Python they are keywords like all others.
_TABLES = {
    "engine": "attention_backend max_tokens_per_request ghost_blocks pin_budget max_overtake "
    "long_prompt_tokens max_long_overtake namespace_weights max_draft_tokens share_prefix_attention "
    "async_scheduling restart_engine max_loras max_lora_rank",
    "server": "unknown_fields structured_additional_properties",
    "limits": "max_queue request_timeout_s tensor_parallel_timeout_s max_body_bytes max_header_bytes "
    "max_json_depth max_json_parts max_messages max_prompts max_samples header_timeout_s body_timeout_s "
    "keep_alive_s slow_client_timeout_s ping_interval_s max_stored_responses max_stored_bytes "
    "max_background_responses max_websockets background_timeout_s max_images max_image_bytes "
    "max_image_pixels max_kept_image_bytes image_url_timeout_s "
    "max_files max_file_bytes max_batch_lines max_batches",
    "replicas": "max_replicas target_queue_s scale_down_after_s replica_cpus replica_gpus",
}
TABLES = tuple(_TABLES)
TABLE_OF = {name: table for table, names in _TABLES.items() for name in names.split()}


#: Flags of settings of the engine that are not `--` and the setting's name, or have a negative form.
ENGINE_FLAGS = {
    "enable_prefix_caching": "--prefix-caching/--no-prefix-caching",
    "deterministic": "--deterministic/--no-deterministic",
    "allow_download": "--download/--no-download",
    "trust_remote_code": "--trust-remote-code",
}


def flag_of(setting: str) -> str:
    """Return the flag of a setting that has one.

    >>> flag_of("block_size"), flag_of("shutdown_grace_s"), flag_of("enable_prefix_caching")
    ('--block-size', '--shutdown-grace', '--prefix-caching')
    """
    flag = "--" + setting.removesuffix("_s").replace("_", "-")
    return ENGINE_FLAGS.get(setting, flag).partition("/")[0]


def place_of(setting: str) -> str:
    """Return where `radixkv serve` takes a setting: its flag, or its place in the configuration file.

    >>> place_of("block_size"), place_of("max_queue")
    ('flag --block-size', 'table [limits] of `radixkv serve --config FILE`')
    """
    if setting in TABLE_OF:
        return f"table [{TABLE_OF[setting]}] of `radixkv serve --config FILE`"
    return f"flag {flag_of(setting)}"


_TENSOR_PARALLEL = "here it is {tensor_parallel}"
_NO_LAYERS = "models are not split by layers; see {tensor_parallel}"
_REPLICAS = "an engine is one replica; `radixkv serve --replicas` serves several"
_TIER = "here it is {kv_tier=host:8GiB}"
_DRAFTS = "here it is {speculation=auto}, which needs no second model"
_CHUNKS = "leave it out: prompts are always computed in chunks"
_TOKENIZER = "leave it out: the tokenizer is the model's own"
_TEMPLATE = "leave it out: the chat template says how calls and thoughts are written (see --chat-format)"
_TEXT = "leave it out: models generate text"
_TEXT_PROMPTS = "leave it out: prompts are text or token ids"
_GRAMMARS = "leave it out: there is one implementation of grammars"
_TLS = "put a proxy that speaks TLS in front of the server"

#: Options of `LLM` and flags of `radixkv serve`: the name elsewhere -> what to write here. `{setting}` and
#: `{setting=value}` stand for a setting, as it is written there: `in_python` and `as_flag`.
ENGINE_NAMES = {
    "model": "here it is {model}",
    "model_path": "here it is {model}",
    "context_length": "here it is {max_model_len}",
    "n_ctx": "here it is {max_model_len}",
    "max_total_tokens": "here it is {num_blocks}, in blocks of {block_size} tokens",
    "num_gpu_blocks_override": "here it is {num_blocks}",
    "kv_cache_memory_bytes": "here it is {kv_cache_memory}",
    "mem_fraction_static": "here it is {gpu_memory_utilization}",
    "chunked_prefill_size": "here it is {max_num_batched_tokens}",
    "max_running_requests": "here it is {max_num_seqs}",
    "n_threads": "here it is {threads}",
    "tensor_parallel_size": _TENSOR_PARALLEL,
    "tp_size": _TENSOR_PARALLEL,
    "tp": _TENSOR_PARALLEL,
    "pipeline_parallel_size": _NO_LAYERS,
    "pp": _NO_LAYERS,
    "data_parallel_size": _REPLICAS,
    "dp": _REPLICAS,
    "dp_size": _REPLICAS,
    "enable_expert_parallel": "leave it out: {tensor_parallel} splits experts with everything else",
    "distributed_executor_backend": "leave it out: each rank of {tensor_parallel} is a process",
    "enforce_eager": "here it is {warm_up=off}",
    "compilation_config": "leave it out; {warm_up=off} starts without CUDA graphs",
    "enable_chunked_prefill": _CHUNKS,
    "no_enable_chunked_prefill": _CHUNKS,
    "max_num_partial_prefills": "here it is {max_tokens_per_request}",
    "long_prefill_token_threshold": "here it is {long_prompt_tokens}",
    "enable_prefix_caching": "leave it out: without {enable_prefix_caching=False} prefixes are cached",
    "no_enable_prefix_caching": "here it is {enable_prefix_caching=False}",
    "disable_radix_cache": "here it is {enable_prefix_caching=False}",
    "prefix_caching_hash_algo": "leave it out: hits are verified on tokens, whatever the hash",
    "enable_prompt_tokens_details": "leave it out: cached tokens are always counted",
    "enable_cache_report": "leave it out: cached tokens are always counted",
    "cache_reuse": "leave it out: text that moved is computed again",
    "schedule_policy": "here it is {scheduling_policy}",
    "enable_deterministic_inference": "here it is {deterministic}",
    "swap_space": _TIER,
    "enable_hierarchical_cache": _TIER,
    "hicache_size": _TIER,
    "hicache_ratio": _TIER,
    "slot_save_path": "here it is {kv_tier=disk:PATH,max=20GiB}",
    "kv_offloading_size": _TIER,
    "kv_offloading_backend": _TIER,
    "kv_transfer_config": "here it is {kv_tier=host:8GiB} or {kv_tier=disk:PATH,max=20GiB}",
    "kv_events_config": "here it is {kv_events=tcp://127.0.0.1:5557}",
    "cpu_offload_gb": "weights are not offloaded, but K/V with {kv_tier=host:8GiB}; {quantization} or a "
    "smaller checkpoint needs less memory",
    "speculative_config": _DRAFTS,
    "speculative_model": _DRAFTS,
    "num_speculative_tokens": "here it is {max_draft_tokens}",
    "enable_lora": "leave it out: {lora} or {lora_dir} enables adapters",
    "lora_modules": "here it is {lora=NAME=PATH}",
    "lora_paths": "here it is {lora=NAME=PATH}",
    "max_cpu_loras": "here it is {max_loras}",
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": "leave it out; prompts may be token ids all the same",
    "revision": "give the folder of that revision as the model, as `hf download` fetches it",
    "download_dir": "give the folder of the downloaded model as the model; HF_HOME moves the hub's cache",
    "hf_token": "set the environment variable HF_TOKEN",
    "hf_overrides": "change config.json in a copy of the folder",
    "load_format": "leave it out: the format is read from the files",
    "attention_config": "here it is {attention_backend}",
    "override_generation_config": "give each request its sampling; {generation_config=none} leaves out the "
    "model's own",
    "disable_log_stats": "leave it out: no statistics are logged; a server has them at /metrics",
    "served_model_name": "it is an option of `radixkv serve`",
    "limit_mm_per_prompt": _TEXT_PROMPTS,
    "mm_processor_kwargs": _TEXT_PROMPTS,
    "runner": _TEXT,
    "task": _TEXT,
    "structured_outputs_config": _GRAMMARS,
    "guided_decoding_backend": _GRAMMARS,
    "tool_call_parser": _TEMPLATE,
    "tool_parser_plugin": _TEMPLATE,
    "reasoning_parser": _TEMPLATE,
    "enable_reasoning": _TEMPLATE,
    "enable_auto_tool_choice": "leave it out: tool calls are always read",
    "chat_template_content_format": "leave it out: it is found from the template",
    "jinja": "leave it out: chat templates are always rendered",
    "chat_template_file": "here it is {chat_template}",
    "disable_log_requests": "a server logs no requests with --no-access-log",
    "no_enable_log_requests": "a server logs no requests with --no-access-log",
    "enable_log_requests": "a server logs requests with --access-log",
    "uvicorn_log_level": "for a server it is --log-level",
    "root_path": "leave it out: the path is set where the proxy in front is set up",
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "preemption_mode": "leave it out: preempted requests come back by prefix hits",
    "use_v2_block_manager": "leave it out: there is one",
}

_SETTING = re.compile(r"\{(\w+)(?:=([^}]*))?\}")


def in_python(hint: str) -> str:
    """Return a hint with its settings as keywords.

    >>> in_python("here it is {warm_up=off}"), in_python("here it is {enable_prefix_caching=False}")
    ('here it is warm_up="off"', 'here it is enable_prefix_caching=False')
    """

    def keyword(found: re.Match[str]) -> str:
        setting, value = found.groups()
        if value is None:
            return str(setting)
        return f"{setting}=False" if value == "False" else f'{setting}="{value}"'

    return _SETTING.sub(keyword, hint)


def as_flag(hint: str) -> str:
    """Return a hint with its settings as the command line takes them.

    >>> as_flag("here it is {warm_up=off}"), as_flag("here it is {enable_prefix_caching=False}")
    ('here it is --warm-up off', 'here it is --no-prefix-caching')
    >>> as_flag("here it is {max_loras}")
    'here it is max_loras in the table [engine] of --config FILE'
    """

    def flag(found: re.Match[str]) -> str:
        setting, value = found.groups()
        if setting == "model":
            return "the argument MODEL"
        if setting in TABLE_OF:
            return f"{setting} in the table [{TABLE_OF[setting]}] of --config FILE"
        if value == "False":
            return "--no-" + flag_of(setting).removeprefix("--")
        return flag_of(setting) + ("" if value is None else f" {value}")

    return _SETTING.sub(flag, hint)


#: Parameters of `SamplingParams`.
SAMPLING_NAMES = {
    "max_new_tokens": "here it is max_tokens",
    "min_new_tokens": "here it is min_tokens",
    "max_completion_tokens": "here it is max_tokens",
    "num_return_sequences": "here it is n",
    "do_sample": "leave it out; temperature=0.0 is greedy",
    "stop_strings": "here it is stop",
    "num_beams": "beams are LLM.beam_search(prompts, BeamSearchParams(beam_width=...))",
    "use_beam_search": "beams are LLM.beam_search(prompts, BeamSearchParams(beam_width=...))",
    "length_penalty": "beams are LLM.beam_search(prompts, BeamSearchParams(length_penalty=...))",
    "early_stopping": "beams are LLM.beam_search(prompts, BeamSearchParams(early_stopping=...))",
    "structured_outputs": 'here it is structured, as structured={"json": schema}',
    "guided_decoding": 'here it is structured, as structured={"json": schema}',
    "response_format": 'here it is structured, as structured={"json": schema}',
    "json_schema": 'here it is structured={"json": schema}',
    "guided_json": 'here it is structured={"json": schema}',
    "guided_regex": 'here it is structured={"regex": ...}',
    "regex": 'here it is structured={"regex": ...}',
    "guided_choice": 'here it is structured={"choice": [...]}',
    "guided_grammar": 'here it is structured={"grammar": lark}',
    "guided_json_object": 'here it is structured={"json_object": True}',
    "guided_whitespace_pattern": 'here it is part of structured={"json": schema, "whitespace_pattern": ...}',
    "logits_processors": "there are logit_bias, bad_words, allowed_token_ids and structured",
    "truncate_prompt_tokens": "shorten the prompt before the call: a prompt that is too long is refused",
    "thinking_token_budget": "leave it out: thoughts count as output, up to max_tokens",
    "repetition_detection": "there are repetition_penalty, frequency_penalty and presence_penalty",
    "detokenize": "leave it out: outputs have both text and token_ids",
    "spaces_between_special_tokens": "leave it out: text is what the tokens spell",
    "output_kind": "leave it out: generate returns whole outputs, stream yields what each step adds",
    "flat_logprobs": "leave it out: logprobs are one entry per token",
    "skip_reading_prefix_cache": "a namespace of its own has nothing cached",
    "cache_salt": "give the call namespace=(name, salt)",
    "extra_args": "leave it out: every parameter has a name of its own",
    "skip_clone": "leave it out: parameters are immutable",
}

#: Parameters of `BeamSearchParams`.
BEAM_NAMES = {
    "temperature": "leave it out: beams are ranked by the model's own probabilities",
    "num_beams": "here it is beam_width",
    "max_new_tokens": "here it is max_tokens",
    "num_return_sequences": "here it is n",
    "include_stop_str_in_output": "leave it out: an end token is in token_ids and not in text",
}

#: Arguments of `LLM`'s and `AsyncEngine`'s calls.
CALL_NAMES = {
    "sampling_params": "here it is params, the second argument",
    "use_tqdm": "here it is progress, as progress=False",
    "lora_request": 'here it is lora="NAME", of an adapter that the engine was given',
    "prompt_token_ids": 'give token ids as the prompt: [1, 2, 3], or {"prompt_token_ids": [1, 2, 3]}',
    "guided_options_request": 'here it is SamplingParams(structured={"json": schema})',
    "chat_template_kwargs": "give each of them as a keyword of the call, as enable_thinking=False",
    "chat_template_content_format": "leave it out: it is found from the template",
    "mm_processor_kwargs": "leave it out: prompts are text or token ids",
    "tokenization_kwargs": "leave it out; encode the prompt yourself and give token ids",
    "concurrency_limit": "leave it out: max_num_seqs of LLM says how many run at once",
    "cache_salt": "here it is namespace=(name, salt)",
}


def fields_of(kind: type, hint: str, *, without: Collection[str] = ()) -> dict[str, str]:
    """Return for each field of a dataclass where it is given: the hint, with the field's name in it."""
    return {
        field.name: hint.format(field.name)
        for field in fields(kind)
        if field.init and field.name not in without
    }


#: So near is a misspelt name, where other names may be given as well.
_MISSPELT = 0.85


def unknown_name(owner: str, name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """Compose the message about an option that nothing has.

    >>> unknown_name("SamplingParams", "max_token", ["max_tokens", "seed"], {})
    "SamplingParams has no option 'max_token'; did you mean 'max_tokens'?"
    """
    message = f"{owner} has no option {name!r}"
    if name in elsewhere:
        return f"{message}: {elsewhere[name]}"
    near = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name, elsewhere, n=1)
    if not near:
        return f"{message}; its options are {', '.join(sorted(known))}"
    meant = f"{message}; did you mean {near[0]!r}?"
    return f"{meant} ({elsewhere[near[0]]})" if near[0] in elsewhere else meant


def check_names(
    elsewhere: Mapping[str, str],
    *,
    owner: str = "",
    error: type[ConfigError | InvalidRequestError] = InvalidRequestError,
) -> Callable[[Target], Target]:
    """Decorate a function, or a class for its constructor: unknown keywords are refused with a hint.

    A function with `**options` takes any name but those of `elsewhere`, and misspelt ones of its own.

    Args:
        elsewhere: name elsewhere -> what to write here.
        owner: its name in messages; empty: its qualified name.
        error: raised for an unknown name.
    """

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            setattr(target, "__init__", _checked(target.__init__, owner or target.__name__, elsewhere, error))  # type: ignore[misc]  # noqa: B010
            return target
        return _checked(target, owner or target.__qualname__, elsewhere, error)

    return decorate


def _checked(
    function: Callable[..., Any],
    owner: str,
    elsewhere: Mapping[str, str],
    error: type[ConfigError | InvalidRequestError],
) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters.values()
    known = frozenset(each.name for each in parameters if each.kind is not each.VAR_KEYWORD) - {"self"}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)

    def refuse(options: Mapping[str, Any]) -> None:
        for name in options.keys() - known:
            is_misspelt = name in elsewhere or difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
            if takes_any and not is_misspelt:
                continue
            message = unknown_name(owner, name, known, elsewhere)
            raise error(message) if error is ConfigError else InvalidRequestError(message, param=name)

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        if not options.keys() <= known:
            refuse(options)
        return function(*args, **options)

    @functools.wraps(function)
    async def checked_coroutine(*args: Any, **options: Any) -> Any:
        return await checked(*args, **options)

    return checked_coroutine if inspect.iscoroutinefunction(function) else checked
