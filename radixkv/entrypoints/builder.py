# SPDX-License-Identifier: Apache-2.0
"""From an EngineConfig to a running Engine: load the model, size the cache, connect the parts."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.states.checkpoint import GRID
from radixkv.cluster.events.open_events import open_events
from radixkv.engine.adapters import AdapterRegistry, open_adapters
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.hooks import StepHook
from radixkv.engine.image_encoding import ImageEncoding
from radixkv.engine.interpreter import no_collections
from radixkv.engine.runner import Runner
from radixkv.engine.served_model import ServedModel
from radixkv.engine.startup import EngineSummary, StartupPhases, return_freed_memory
from radixkv.engine.weights import WeightReader
from radixkv.entrypoints.check_start import check_start
from radixkv.entrypoints.served_weights import ServedWeights
from radixkv.errors import ConfigError
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.model.computed_by import computed_by
from radixkv.model.device_paths import check_instruction_set, kernels_compiled_ahead
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.loading.sampling_defaults import sampling_source
from radixkv.model.make_runner import make_runner, token_budget
from radixkv.model.parallel.parallel_runner import TensorParallelRunner, make_parallel_runner
from radixkv.model.parallel.worker_group import WorkerGroup, threads_of_rank
from radixkv.model.runner import ModelRunner
from radixkv.observe.advisor import Advisor
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.speculation.speculation import Speculation
from radixkv.speculation.step_costs import StepCosts
from radixkv.tiers.checkpoint_memory import bytes_per_checkpoint
from radixkv.tiers.open_tiers import open_tiers
from radixkv.tiers.record import STATE_FORMAT, BlockKind
from radixkv.tiers.spec import parse_tiers
from radixkv.tiers.tier import Tier, TierStack
from radixkv.tiers.tier_use import TierUse

logger = logging.getLogger("radixkv")

_GPU_SHARE = EngineConfig().gpu_memory_utilization


def build_engine(
    config: EngineConfig,
    step_costs: StepCosts | None = None,
    *,
    tier: Tier | TierStack | None = None,
    loaded: LoadedModel | None = None,
) -> Engine:
    """Load the model and build everything around it.

    Args:
        step_costs, tier: see `engine_on_runner`; `tier` takes the place of `config.kv_tier`.
        loaded: the model, where it has been loaded before.

    Raises:
        ConfigError: settings that do not fit the model or the machine.
        ModelLoadError: the model can't be had or served.
        EngineStoppedError: one of several ranks has failed.
    """
    phases = StartupPhases.since_process_start("imports")
    check_start(config, is_loaded=loaded is not None)
    check_instruction_set()
    if tier is not None and config.kv_tier:
        raise ConfigError("kv_tier and tier both say where blocks are kept; give one of them")
    if config.threads is not None or config.tensor_parallel > 1:
        torch.set_num_threads(threads_of_rank(config))
    with no_collections(), ExitStack() as undo, kernels_compiled_ahead(config.device, config.dtype):
        events = open_events(config.kv_events)
        if events is not None:
            undo.callback(events.close)
        with phases.phase("model"):
            ranks = None
            if config.tensor_parallel > 1:
                ranks = WorkerGroup(config)
                undo.callback(ranks.close)
            if loaded is None:
                loaded = load_model(config)
        if loaded.device.type == "cpu" and config.gpu_memory_utilization != _GPU_SHARE:
            logger.warning(
                "--gpu-memory-utilization has no effect on a CPU: --kv-cache-memory sets the size of the KV "
                "cache, such as 4g"
            )
        with phases.phase("weights and K/V"):
            engine = engine_for_model(config, loaded, step_costs, tier=tier, events=events, ranks=ranks)
        with phases.phase("warm-up"):
            # Ranks must wait for another rank's share of a step only, not for its compiling.
            if config.warm_up != "off" or ranks is not None:
                engine.runner.warm_up(thorough=config.warm_up == "full")
            gc.collect()
            return_freed_memory()
        undo.pop_all()
    engine.summary = summarize(engine, phases)
    return engine


def engine_for_model(
    config: EngineConfig,
    loaded: LoadedModel,
    step_costs: StepCosts | None = None,
    *,
    tier: Tier | TierStack | None = None,
    events: StepHook | None = None,
    ranks: WorkerGroup | None = None,
) -> Engine:
    """Build an engine around a model that is loaded already.

    Args:
        ranks: what computes the model together with this process.

    Raises:
        ConfigError: the KV cache does not fit, the backend does not run on this device, or the model can't be
            split over the ranks.
        EngineStoppedError: a rank has failed.
    """
    config = replace(config, max_num_batched_tokens=token_budget(config, loaded.device))
    runner: ModelRunner | TensorParallelRunner
    adapters: AdapterRegistry | None = None
    if ranks is None:
        runner, max_model_len = make_runner(config, loaded)
        adapters = open_adapters(config, runner.adapters, loaded.name)
    else:
        runner, max_model_len = make_parallel_runner(config, loaded, ranks)
    specs = parse_tiers(config.kv_tier)
    if specs:
        allocate = _pinned if loaded.device.type == "cuda" else None
        kind = _block_kind(config, loaded, runner)
        tier = open_tiers(specs, kind, allocate, _state_kind(kind, runner))
    model = ServedModel(
        tokenizer=loaded.tokenizer,
        max_model_len=max_model_len,
        context_length=config.max_model_len or loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        end_token_ids=frozenset(loaded.eos_token_ids),
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        default_sampling=loaded.default_sampling,
        lengths=loaded.lengths,
        image_processor=None if loaded.vision is None else loaded.vision.processor,
    )
    weights = ServedWeights(config, loaded, runner) if isinstance(runner, ModelRunner) else None
    return engine_on_runner(
        config,
        runner,
        model,
        step_costs=step_costs,
        tier=tier,
        events=events,
        adapters=adapters,
        weights=weights,
    )


def _block_kind(
    config: EngineConfig, loaded: LoadedModel, runner: ModelRunner | TensorParallelRunner
) -> BlockKind:
    return BlockKind(
        model=loaded.fingerprint,
        kv_format=runner.kv_format,
        block_size=runner.block_size,
        block_bytes=runner.bytes_per_block,
        computed_by=computed_by(loaded.device, runner.backend_name, config.tensor_parallel)
        if config.deterministic
        else "",
        model_name=loaded.name,
    )


def _state_kind(kind: BlockKind, runner: Runner) -> BlockKind | None:
    """The kind of a model's states or windows, which depend on the K/V beside them; None: it has none."""
    size = bytes_per_checkpoint(runner)
    if not size:
        return None
    parts = [f"states {STATE_FORMAT}"] if runner.states is not None else []
    what = " and ".join(parts if runner.windows is None else [*parts, "windows"])
    return replace(kind, kv_format=f"{what} beside {kind.kv_format}", block_size=GRID, block_bytes=size)


def _pinned(size: int) -> npt.NDArray[np.uint8]:
    """Memory that a GPU copies from and to without a detour."""
    memory: npt.NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def engine_on_runner(
    config: EngineConfig,
    runner: Runner,
    model: ServedModel,
    *,
    clock: Callable[[], float] = time.monotonic,
    step_costs: StepCosts | None = None,
    tier: Tier | TierStack | None = None,
    load_deadline_s: float = 0.2,
    events: StepHook | None = None,
    adapters: AdapterRegistry | None = None,
    weights: WeightReader | None = None,
) -> Engine:
    """Build an engine on any runner, with a prefix cache over its blocks and all extensions.

    Args:
        config: the settings, with `max_num_batched_tokens` given.
        step_costs: costs of rows, which decide how many guesses pay; None: the costs of the runner's backend.
        tier: a memory below the cache's pool that keeps blocks; see `radixkv.tiers.tier`.
        load_deadline_s: longest wait of a request for blocks of the tier, since some came last.
        events: publishes block events; None: as `config.kv_events` says.
        weights: reads other weights for the runner; None: it can be given none.

    Raises:
        ConfigError: a tier keeps no states and the model has some, or the block size does not suit these.
    """
    cache = PrefixCache(
        runner.num_blocks,
        runner.block_size,
        config.eviction_policy,
        enabled=config.enable_prefix_caching,
        ghost_blocks=config.ghost_blocks,
        pin_budget=config.pin_budget,
        model=model.fingerprint,
        observer=Advisor(runner.block_size),
        num_state_slots=0 if runner.states is None else runner.states.num_slots,
        windows=None if runner.windows is None else runner.windows.spec,
    )
    hooks: list[StepHook] = [GrammarCompiler(lambda: _vocabulary(model))]
    if config.speculation != "off":
        costs = step_costs or StepCosts.of_backend(runner.backend_name)
        hooks.append(Speculation(config.max_draft_tokens, costs))
    if tier is not None and cache.enabled:
        hooks.append(TierUse(tier, runner, clock, load_deadline_s))
    if runner.images is not None:
        hooks.append(ImageEncoding(runner.images))
    events = events or open_events(config.kv_events)
    if events is not None:
        hooks.append(events)
    return Engine(config, runner, cache, model, clock=clock, hooks=hooks, adapters=adapters, weights=weights)


def _vocabulary(model: ServedModel) -> Vocabulary:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer")
    # A model may name ends that its tokenizer has no tokens for; no grammar allows these.
    ends = frozenset(end for end in model.end_token_ids if end < tokenizer.vocab_size)
    return Vocabulary(tokenizer, ends)


def summarize(engine: Engine, phases: StartupPhases) -> EngineSummary:
    """The figures of the banner."""
    runner, states = engine.runner, engine.runner.states
    windows = None if runner.windows is None else runner.windows.spec
    return EngineSummary(
        model=engine.model.name,
        backend=runner.backend_name,
        dtype=runner.dtype_name,
        device=runner.device_name,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        kv_tokens=runner.num_blocks * runner.block_size,
        kv_bytes=runner.num_blocks * runner.bytes_per_block,
        max_model_len=engine.limits.max_model_len,
        phases=phases,
        sampling={"temperature": SamplingParams().temperature, **engine.model.default_sampling},
        sampling_source=sampling_source(engine.model.default_sampling, engine.config.generation_config),
        num_states=0 if states is None else states.num_slots,
        state_bytes=0 if states is None else states.num_bytes,
        num_window_blocks=0 if windows is None else windows.num_blocks,
        window_bytes=0 if windows is None else windows.num_blocks * windows.block_bytes,
    )
