# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm serve` that have another name here, or none: an unknown option's error says which."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from radixkv.errors import ConfigError

_FOUND = "the chat template tells how calls and thoughts are written: leave it out; --chat-format overrides"
_DRAFTS = "--speculation auto (the default) guesses from cached text; there are no draft models"
_TIERS = "use --kv-tier host:8GiB or disk:PATH,max=20GiB"

#: Flag of vLLM -> what to do here. Flags of the same name on both sides are not listed.
VLLM_FLAGS: Mapping[str, str] = {
    "--model": "the model is an argument: radixkv serve MODEL",
    "--tokenizer": "the tokenizer is the model's own: leave it out",
    "--tensor-parallel-size": "use --tensor-parallel",
    "-tp": "use --tensor-parallel",
    "--data-parallel-size": "use --replicas",
    "-dp": "use --replicas",
    "--pipeline-parallel-size": "models are not split by layers: use --tensor-parallel",
    "-pp": "models are not split by layers: use --tensor-parallel",
    "--enable-expert-parallel": "experts are split with everything else: use --tensor-parallel",
    "--distributed-executor-backend": "ranks are processes of this machine: leave it out",
    "--kv-cache-memory-bytes": "use --kv-cache-memory, such as 4g",
    "--num-gpu-blocks-override": "use --num-blocks",
    "--swap-space": _TIERS,
    "--cpu-offload-gb": "weights are not offloaded; for K/V use --kv-tier host:8GiB",
    "--kv-offloading-size": _TIERS,
    "--kv-offloading-backend": _TIERS,
    "--kv-transfer-config": _TIERS,
    "--kv-events-config": "use --kv-events tcp://127.0.0.1:5557",
    "--enable-prefix-caching": "prefixes are cached unless --no-prefix-caching is given: leave it out",
    "--no-enable-prefix-caching": "use --no-prefix-caching",
    "--prefix-caching-hash-algo": "hits are verified on tokens whatever the hash: leave it out",
    "--enable-prompt-tokens-details": "cached tokens are always in usage: leave it out",
    "--enable-chunked-prefill": "prompts are always computed in chunks: leave it out",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks: leave it out",
    "--max-num-partial-prefills": "set max_tokens_per_request in the table [engine] of --config FILE",
    "--long-prefill-token-threshold": "set long_prompt_tokens in the table [engine] of --config FILE",
    "--tool-call-parser": _FOUND,
    "--tool-parser-plugin": _FOUND,
    "--reasoning-parser": _FOUND,
    "--enable-reasoning": _FOUND,
    "--enable-auto-tool-choice": "tool calls are always read: leave it out",
    "--chat-template-content-format": "the chat template is asked for it: leave it out",
    "--structured-outputs-config": "structured output needs no settings: leave it out",
    "--guided-decoding-backend": "structured output needs no settings: leave it out",
    "--speculative-config": _DRAFTS,
    "--speculative-model": _DRAFTS,
    "--num-speculative-tokens": "set max_draft_tokens in the table [engine] of --config FILE",
    "--enforce-eager": "use --warm-up off",
    "--compilation-config": "use --warm-up full, quick or off",
    "--load-format": "weights are safetensors or GGUF, told by the files: leave it out",
    "--download-dir": "the hub's cache is where HF_HOME says: leave it out",
    "--revision": "fetch the revision with hf download, and give its folder",
    "--hf-overrides": "change config.json in a copy of the folder",
    "--override-generation-config": "requests set sampling; --generation-config none ignores the model's",
    "--enable-lora": "use --lora NAME=PATH, or --lora-dir PATH",
    "--lora-modules": "use --lora NAME=PATH",
    "--max-cpu-loras": "set max_loras in the table [engine] of --config FILE",
    "--disable-log-requests": "use --no-access-log",
    "--no-enable-log-requests": "use --no-access-log",
    "--enable-log-requests": "use --access-log",
    "--disable-log-stats": "figures are at /metrics: leave it out",
    "--uvicorn-log-level": "use --log-level",
    "--root-path": "set the path where the proxy in front is set up: leave it out",
    "--ssl-keyfile": "put a proxy that speaks TLS in front",
    "--ssl-certfile": "put a proxy that speaks TLS in front",
    "--limit-mm-per-prompt": "images are not read: leave it out",
    "--mm-processor-kwargs": "images are not read: leave it out",
    "--task": "models generate text: leave it out",
    "--runner": "models generate text: leave it out",
    "--preemption-mode": "preempted requests come back by prefix hits: leave it out",
    "--use-v2-block-manager": "leave it out",
}


def refuse_vllm_flags(arguments: Sequence[str], known: Collection[str]) -> None:
    """Refuse a flag of vLLM's that this command does not have, with a hint.

    Args:
        known: the command's own options.

    Raises:
        ConfigError: names the flag, and what takes its place.
    """
    for argument in arguments:
        if argument == "--":
            return
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in VLLM_FLAGS and flag not in known:
            raise ConfigError(f"{flag} is a flag of vLLM's that has another form here: {VLLM_FLAGS[flag]}")
