# SPDX-License-Identifier: Apache-2.0
"""EngineConfig: every setting of an engine, in one frozen place, checked on construction."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.errors import ConfigError
from radixkv.option_names import ENGINE_NAMES, check_names, in_python, place_of

EMBEDDED_MODEL = "smollm2-135m-instruct"

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_size(text: str) -> int:
    """Return the bytes of `2g`, `512MiB`, `1.5 GB` or a plain number (also `8e9`); units are powers of 1024.

    >>> parse_size("2g"), parse_size("1.5MiB"), parse_size("4096")
    (2147483648, 1572864, 4096)

    Raises:
        ConfigError: not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text!r} is not a size; write bytes, or a number with k, m, g or t (as 2g)")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if math.isinf(size):
        raise ConfigError(f"{text!r} is larger than any memory; write a size such as 2g")
    return int(size)


class _SettingsGroup:
    """The checks that all groups of settings share: an error names the setting, its value and its range."""

    def __post_init__(self) -> None:
        """End the chain of the groups' checks."""

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Raise ConfigError unless the setting has an expected value."""
        if not condition:
            raise ConfigError(f"{name} must be {expected}, not {getattr(self, name)!r} ({place_of(name)})")

    def one_of(self, name: str, *choices: str | None) -> None:
        """Require one of these values."""
        self.require(getattr(self, name) in choices, name, "one of " + ", ".join(str(c) for c in choices))

    def at_least(self, name: str, low: int) -> None:
        """Require an integer, or None for the default, of at least `low`."""
        value = getattr(self, name)
        good = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= low)
        self.require(good, name, f"an integer of at least {low}")


@dataclass(frozen=True)
class ModelConfig(_SettingsGroup):
    """The model, and how it is loaded and computed.

    Args:
        model: the embedded model's name, a folder, a hub id, or a GGUF file.
        dtype: `auto` (float32 on CPU, bfloat16 on GPU and for quantised checkpoints), `float32`, `bfloat16`
            or `float16`.
        device: `auto`, `cpu` or `cuda`.
        attention_backend: `auto`, `cpu` or `triton`.
        quantization: `int8` or `fp8` weights, rounded at load; None: weights as they are stored, which may be
            GGUF's blocks, or one of these forms: `radixkv.model.loading.checkpoint_formats.FORMATS`.
        gguf: weights of a GGUF file: `packed` keeps its blocks, `float32` dequantises them; `auto`
            keeps them where that is possible and neither `dtype` nor `quantization` says otherwise.
        max_model_len: longest prompt + output; None: the model's own limit (or what fits).
        deterministic: logits do not depend on cache state, chunking or batch mates.
        share_prefix_attention: attend shared prefixes once per group of requests.
        warm_up: before the first request, `full` compiles all kernels and records a GPU's steps as CUDA
            graphs, `quick` runs one small step, `off` none: the first requests wait for the missing parts.
        seed: seed of requests that bring none; None: from the operating system.
        chat_template: Jinja text that replaces the model's own; None: the model's.
        generation_config: `auto`: the sampling in the model's generation_config.json (temperature, top_p,
            top_k, min_p, repetition_penalty) is the default of requests without; `none`: it is not read.
        allow_download: fetch models from the hub; without, those on this machine are all there are.
        trust_remote_code: run Python code that comes with a model, where transformers has none of its own for
            it; without, such a model is refused.

    Raises:
        ConfigError: a value out of range.
    """

    model: str = EMBEDDED_MODEL
    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    quantization: str | None = None
    gguf: str = "auto"
    max_model_len: int | None = None
    deterministic: bool = False
    share_prefix_attention: bool = True
    warm_up: str = "full"
    seed: int | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    allow_download: bool = True
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(self.model) and isinstance(self.model, str), "model", "a name, path or hub id")
        self.one_of("dtype", "auto", "float32", "bfloat16", "float16")
        self.one_of("device", "auto", "cpu", "cuda")
        self.one_of("attention_backend", "auto", "cpu", "triton")
        self.one_of("quantization", None, "int8", "fp8")
        self.one_of("gguf", "auto", "packed", "float32")
        self.one_of("generation_config", "auto", "none")
        self.one_of("warm_up", "full", "quick", "off")
        self.at_least("max_model_len", 1)


@dataclass(frozen=True)
class CacheConfig(_SettingsGroup):
    """The prefix cache: the size of its memory, what is evicted, and the tiers below it.

    Args:
        kv_cache_dtype: `auto` (the model's dtype), `int8`, `fp8_e4m3` or `fp8_e5m2`.
        block_size: tokens per KV block, a power of two from 8 to 256.
        num_blocks: KV blocks; None: sized from memory.
        kv_cache_memory: bytes for KV; None: sized from free memory.
        state_memory: bytes for the states of layers that keep some, apart from `kv_cache_memory`; None: a
            part of the memory for KV. See the page on hybrid models.
        window_memory: bytes for K/V of layers with a sliding window, whose past is freed then; 0: it is kept;
            None: freed where contexts are long. See the page on windows.
        gpu_memory_utilization: share of the GPU's memory the engine may use, in (0, 1].
        enable_prefix_caching: find prompts in the cache; without, every prompt is computed in full.
        kv_tier: memories below the KV cache, which keep the blocks it has no room for, the quickest first:
            `host:SIZE`, `disk:PATH,max=SIZE`; see the guide to tiers.
        kv_events: where to publish which blocks are cached, as tcp://127.0.0.1:5557; None: nowhere.
            See the guide to block events.
        eviction_policy: one of `radixkv.cache.eviction.registry.POLICIES`; checked when the engine is made.
        ghost_blocks: evicted blocks remembered to explain misses; None: 4 x the pool.
        pin_budget: share of the pool that pins may hold, in [0, 1).

    Raises:
        ConfigError: a value out of range.
    """

    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    state_memory: int | None = None
    window_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kv_tier: tuple[str, ...] = ()
    kv_events: str | None = None
    eviction_policy: str = "lru"
    ghost_blocks: int | None = None
    pin_budget: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        tiers = (self.kv_tier,) if isinstance(self.kv_tier, str) else tuple(self.kv_tier)
        object.__setattr__(self, "kv_tier", tiers)
        self.require(all(isinstance(tier, str) for tier in tiers), "kv_tier", "one text for each tier")
        self.require(not tiers or self.enable_prefix_caching, "kv_tier", "empty without prefix caching")
        has_events = self.kv_events is not None
        self.require(
            not has_events or self.enable_prefix_caching, "kv_events", "unset without prefix caching"
        )
        self.one_of("kv_cache_dtype", "auto", "int8", "fp8_e4m3", "fp8_e5m2")
        size = self.block_size
        self.require(
            isinstance(size, int) and 8 <= size <= 256 and size & (size - 1) == 0,
            "block_size",
            "a power of two from 8 to 256",
        )
        for name in ("num_blocks", "kv_cache_memory", "state_memory"):
            self.at_least(name, 1)
        for name in ("window_memory", "ghost_blocks"):
            self.at_least(name, 0)
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError(
                "num_blocks and kv_cache_memory both set the size of the KV cache; give one of "
                "--num-blocks and --kv-cache-memory"
            )
        share = self.gpu_memory_utilization
        self.require(0.0 < share <= 1.0, "gpu_memory_utilization", "above 0 and at most 1")
        self.require(0.0 <= self.pin_budget < 1.0, "pin_budget", "from 0 to below 1")


@dataclass(frozen=True)
class SchedulerConfig(_SettingsGroup):
    """The queue, the order of admission, and the tokens of a step.

    Args:
        max_num_batched_tokens: token budget of a step; None: 512 on CPU, 8192 on GPU.
        max_num_seqs: most requests that run at once.
        max_tokens_per_request: most prompt tokens of one request in a step while others also have prompt
            tokens to compute; None: half the budget.
        max_queue: most waiting requests before new ones are refused.
        scheduling_policy: one of `radixkv.scheduling.policy.POLICIES`; checked when the engine is made.
            `auto`: `fair` on a server with API keys of several tenants, else `prefix`.
        max_overtake: most steps for which later requests may be admitted before an earlier one.
        long_prompt_tokens: a prompt that misses more tokens than that begins only when each long prompt in
            progress has twice as many left to compute; None: twice the token budget of a step; as many as
            `max_model_len`: all prompts begin as soon as they fit.
        max_long_overtake: most later long prompts that may begin before an earlier long one.
        namespace_weights: shares of namespaces (of tenants, on the server) under the `fair` policy, as a
            mapping, or NAME=WEIGHT for each; others have weight 1.
        async_scheduling: plan and launch the next step while one runs, where that needs none of its tokens;
            answers stay the same. None: on a GPU.
        request_timeout_s: a request older than this is aborted; None: never.

    Raises:
        ConfigError: a value out of range.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    max_tokens_per_request: int | None = None
    max_queue: int = 10_000
    scheduling_policy: str = "auto"
    max_overtake: int = 32
    long_prompt_tokens: int | None = None
    max_long_overtake: int = 128
    namespace_weights: Mapping[str, float] | None = None
    async_scheduling: bool | None = None
    request_timeout_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_tokens_per_request", "max_queue"):
            self.at_least(name, 1)
        for name in ("max_overtake", "max_long_overtake"):
            self.at_least(name, 0)
        self.at_least("long_prompt_tokens", 1)
        for name, weight in (self.namespace_weights or {}).items():
            self.require(
                isinstance(name, str) and isinstance(weight, int | float) and 0 < weight < math.inf,
                "namespace_weights",
                "a mapping of names to numbers above 0",
            )
        timeout = self.request_timeout_s
        self.require(timeout is None or timeout > 0, "request_timeout_s", "above 0 seconds")


@dataclass(frozen=True)
class ParallelConfig(_SettingsGroup):
    """The ranks and threads that compute one model.

    Args:
        tensor_parallel: ranks that compute one model together, a process for each (and a GPU, where there are
            some): at most as many as the model has KV heads.
        tensor_parallel_timeout_s: a rank that lets the others wait for longer, in seconds, is taken for hung:
            the engine fails, and is made again.
        threads: torch CPU threads, of each rank; None: as many as there are physical cores available, shared
            among the ranks.
        restart_engine: replace an engine that has failed, at most five times in ten minutes; until
            it is there, requests are refused with the advice to come again. None: with `tensor_parallel`.

    Raises:
        ConfigError: a value out of range.
    """

    tensor_parallel: int = 1
    tensor_parallel_timeout_s: float = 30.0
    threads: int | None = None
    restart_engine: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("tensor_parallel", 1)
        self.require(self.tensor_parallel is not None, "tensor_parallel", "an integer of at least 1")
        timeout = self.tensor_parallel_timeout_s
        self.require(0 < timeout < math.inf, "tensor_parallel_timeout_s", "above 0 seconds")
        self.at_least("threads", 1)


@dataclass(frozen=True)
class LoRAConfig(_SettingsGroup):
    """LoRA adapters.

    Args:
        lora: LoRA adapters, as NAME=PATH each, of folders that PEFT has written.
        lora_dir: folder below which adapters may be loaded while the server runs; None: none may.
        max_loras: most adapters kept in memory while no request uses them; others are read when asked for.
        max_lora_rank: largest rank of an adapter.

    Raises:
        ConfigError: a value out of range.
    """

    lora: tuple[str, ...] = ()
    lora_dir: str | None = None
    max_loras: int = 8
    max_lora_rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        adapters = (self.lora,) if isinstance(self.lora, str) else tuple(self.lora)
        object.__setattr__(self, "lora", adapters)
        self.require(all(isinstance(each, str) for each in adapters), "lora", "NAME=PATH for each adapter")
        self.at_least("max_loras", 1)
        self.at_least("max_lora_rank", 1)

    @property
    def takes_adapters(self) -> bool:
        """True if adapters are loaded at the start or may be later."""
        return bool(self.lora) or self.lora_dir is not None


@dataclass(frozen=True)
class SpeculativeConfig(_SettingsGroup):
    """Guesses of next tokens.

    Args:
        speculation: `auto` guesses next tokens from the cache and from earlier text, and checks
            them in the same step; answers stay the same. `off` computes one token a step.
        max_draft_tokens: most guesses for a request in a step.

    Raises:
        ConfigError: a value out of range.
    """

    speculation: str = "auto"
    max_draft_tokens: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("speculation", "auto", "off")
        self.at_least("max_draft_tokens", 1)


@check_names(
    {name: in_python(hint) for name, hint in ENGINE_NAMES.items()},
    owner="LLM (EngineConfig)",
    error=ConfigError,
)
@dataclass(frozen=True)
class EngineConfig(SpeculativeConfig, LoRAConfig, ParallelConfig, SchedulerConfig, CacheConfig, ModelConfig):
    """Settings of one engine: those of all groups, as keywords beside the model.

    It is each of its groups, and goes whole to what needs one of them: a scheduler takes a `SchedulerConfig`.
    Sizes are in tokens unless the name says otherwise.

    Raises:
        ConfigError: an unknown setting, with the one that was meant; a value out of range, with the setting,
            the value and the range; settings that exclude each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.takes_adapters and self.tensor_parallel > 1:
            raise ConfigError(
                "adapters (--lora, --lora-dir) are computed by one rank; leave --tensor-parallel out"
            )

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Build a config from a model and a mapping of options.

        Raises:
            ConfigError: see the class.
        """
        return cls(model, **options)
