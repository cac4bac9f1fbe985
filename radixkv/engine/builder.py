"""From an EngineConfig to a running Engine: load the model, size the cache, connect the parts."""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.cache.eviction.registry import make_eviction_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.startup import StartupPhases, return_freed_memory
from radixkv.errors import ConfigError
from radixkv.model.cpu.thread_control import ThreadControl
from radixkv.model.kv_memory import ModelShape, size_kv_cache
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.runner import ModelRunner
from radixkv.scheduling.batch import Batch

DEFAULT_BUDGET = {"cpu": 512, "cuda": 8192}
# The first touch of a page costs microseconds, many times what is written to it: on a CPU, this much of the
# K/V memory is touched before the first request.
_TOUCHED_KV_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """What the start-up banner says; `kv_tokens` is what all blocks hold together.

    `phases` has the seconds of each phase of the start; the server adds its own.
    """

    model: str
    backend: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    kv_tokens: int
    kv_bytes: int
    max_model_len: int
    phases: StartupPhases


def build_engine(config: EngineConfig) -> Engine:
    """Load the model and build everything around it.

    Raises:
        ConfigError: settings that do not fit the model or the machine.
        ModelLoadError: the model can't be had or served.
    """
    phases = StartupPhases.since_process_start("imports")
    # Nobody should wait for the model to hear of a name that is none.
    make_eviction_policy(config.eviction_policy)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with phases.phase("model"):
        loaded = load_model(config)
    with phases.phase("weights and K/V"):
        engine = engine_for_model(config, loaded)
    with phases.phase("warm-up"):
        warm_up(engine)
        return_freed_memory()
        # What was made so far stays: the garbage collector need not look at it again before the end.
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)
    engine.summary = summarize(engine, phases)
    return engine


def warm_up(engine: Engine) -> None:
    """Run one small step, so that the first request does not wait for what is compiled or read on first use.

    It leaves its K/V in blocks that are free, where nobody reads them. The memory of the blocks that are used
    first is made ready, too.
    """
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    if runner.device.type == "cpu":
        runner.kv.clear(min(_TOUCHED_KV_BYTES // runner.spec.bytes_per_block, runner.spec.num_blocks))
    size, num_blocks = runner.spec.block_size, min(2, runner.spec.num_blocks)
    count = min(num_blocks * size, engine.scheduler.max_num_batched_tokens, engine.max_model_len)
    tokens = np.arange(count, dtype=np.int64)
    runner.execute(
        Batch(
            entries=[],
            token_ids=np.zeros(count, dtype=np.int64),
            positions=tokens,
            query_starts=np.array([0, count], dtype=np.int32),
            context_lengths=np.array([count], dtype=np.int32),
            block_tables=[np.arange(-(-count // size), dtype=np.int32)],
            write_slots=tokens,
            write_rows=None,
            logit_rows=tokens[-1:],
            copy_groups=[],
        )
    )


def engine_for_model(config: EngineConfig, loaded: LoadedModel) -> Engine:
    """Build an engine around a model that is loaded already.

    Raises:
        ConfigError: the KV cache does not fit, or the backend does not run on this device.
    """
    device = loaded.device
    backend = config.attention_backend
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "cpu"
    if backend == "triton" and device.type != "cuda":
        raise ConfigError("attention backend triton needs a GPU; use --attention-backend cpu on a CPU")
    shape = ModelShape(
        num_layers=loaded.num_layers,
        num_kv_heads=loaded.num_kv_heads,
        head_size=loaded.head_size,
        dtype=loaded.dtype,
        device=device,
        max_model_len=loaded.max_model_len,
    )
    # A number of threads that the user chose is kept, and so is the one that fixes deterministic mode's sums.
    adapts = device.type == "cpu" and config.threads is None and not config.deterministic
    spec, max_model_len = size_kv_cache(config, shape)
    budget = config.max_num_batched_tokens or DEFAULT_BUDGET[device.type]
    runner = ModelRunner(
        loaded,
        spec,
        backend=backend,
        max_num_tokens=budget,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        deterministic=config.deterministic,
        share_prefixes=config.share_prefix_attention,
        quantization=config.quantization,
        thread_control=ThreadControl(torch.get_num_threads()) if adapts else None,
    )
    cache = PrefixCache(
        spec.num_blocks,
        config.block_size,
        config.eviction_policy,
        enabled=config.enable_prefix_caching,
        ghost_blocks=config.ghost_blocks,
        pin_budget=config.pin_budget,
    )
    return Engine(
        config,
        runner=runner,
        cache=cache,
        tokenizer=loaded.tokenizer,
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        vocab_size=loaded.vocab_size,
        end_token_ids=loaded.eos_token_ids,
        model_name=loaded.name,
        model_fingerprint=loaded.fingerprint,
    )


def summarize(engine: Engine, phases: StartupPhases) -> EngineSummary:
    """The figures of the banner."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    spec = runner.spec
    return EngineSummary(
        model=engine.model_name,
        backend=runner.backend_name,
        dtype=str(runner.model.dtype).removeprefix("torch."),
        device=str(runner.device),
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        kv_tokens=spec.num_blocks * spec.block_size,
        kv_bytes=spec.num_blocks * spec.bytes_per_block,
        max_model_len=engine.max_model_len,
        phases=phases,
    )
