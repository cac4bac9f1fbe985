"""From an EngineConfig to a running Engine: load the model, size the cache, connect the parts."""

from __future__ import annotations

import atexit
import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cluster.events.open_events import open_events
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.policy_names import check_policies
from radixkv.engine.runner import Runner
from radixkv.engine.startup import EngineSummary, StartupPhases, return_freed_memory
from radixkv.errors import ConfigError
from radixkv.model.computed_by import computed_by
from radixkv.model.device_paths import check_instruction_set
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.make_runner import make_runner, token_budget
from radixkv.model.parallel.parallel_runner import TensorParallelRunner, make_parallel_runner
from radixkv.model.parallel.threads import threads_of_rank
from radixkv.model.parallel.worker_group import WorkerGroup
from radixkv.model.runner import ModelRunner
from radixkv.observe.advisor import Advisor
from radixkv.speculation.step_costs import StepCosts
from radixkv.tiers.open_tiers import check_tiers, open_tiers
from radixkv.tiers.record import BlockKind
from radixkv.tiers.spec import parse_tiers
from radixkv.tiers.stack import TierStack
from radixkv.tiers.tier import Tier

if TYPE_CHECKING:
    from radixkv.cluster.events.publisher import EventPublisher


def build_engine(
    config: EngineConfig,
    step_costs: StepCosts | None = None,
    *,
    tier: Tier | TierStack | None = None,
    loaded: LoadedModel | None = None,
) -> Engine:
    """Load the model and build everything around it.

    Args:
        step_costs: see `Engine`.
        tier: see `Engine`; instead of those that `config.kv_tier` names.
        loaded: the model, where it has been loaded before.

    Raises:
        ConfigError: settings that do not fit the model or the machine.
        ModelLoadError: the model can't be had or served.
        EngineStoppedError: one of several ranks has failed.
    """
    phases = StartupPhases.since_process_start("imports")
    # Nobody should wait for the model to hear of a name that is none, or of instructions that are not there.
    check_policies(config)
    check_instruction_set()
    check_tiers(parse_tiers(config.kv_tier))
    if tier is not None and config.kv_tier:
        raise ConfigError("kv_tier and tier both say where blocks are kept; give one of them")
    if config.threads is not None or config.tensor_parallel > 1:
        torch.set_num_threads(threads_of_rank(config))
    with ExitStack() as undo:
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
        with phases.phase("weights and K/V"):
            engine = engine_for_model(config, loaded, step_costs, tier=tier, events=events, ranks=ranks)
        with phases.phase("warm-up"):
            # What ranks wait for must be another rank's share of a step, not what it compiles.
            if config.warm_up != "off" or ranks is not None:
                engine.runner.warm_up(thorough=config.warm_up == "full")
            return_freed_memory()
            # What was made so far stays: the garbage collector need not look at it again before the end.
            gc.collect()
            gc.freeze()
            atexit.register(gc.unfreeze)
        undo.pop_all()
    engine.summary = summarize(engine, phases)
    return engine


def engine_for_model(
    config: EngineConfig,
    loaded: LoadedModel,
    step_costs: StepCosts | None = None,
    *,
    tier: Tier | TierStack | None = None,
    events: EventPublisher | None = None,
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
    runner: ModelRunner | TensorParallelRunner
    if ranks is None:
        runner, max_model_len = make_runner(config, loaded)
    else:
        runner, max_model_len = make_parallel_runner(config, loaded, ranks)
    specs = parse_tiers(config.kv_tier)
    if specs:
        allocate = _pinned if loaded.device.type == "cuda" else None
        tier = open_tiers(specs, _block_kind(config, loaded, runner), allocate)
    return engine_on_runner(
        config,
        runner,
        tokenizer=loaded.tokenizer,
        max_model_len=max_model_len,
        context_length=config.max_model_len or loaded.max_model_len,
        max_num_batched_tokens=token_budget(config, loaded.device),
        vocab_size=loaded.vocab_size,
        end_token_ids=loaded.eos_token_ids,
        model_name=loaded.name,
        model_fingerprint=loaded.fingerprint,
        step_costs=step_costs,
        tier=tier,
        events=events,
        default_sampling=loaded.default_sampling,
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


def _pinned(size: int) -> npt.NDArray[np.uint8]:
    """Memory that a GPU copies from and to without a detour."""
    memory: npt.NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def engine_on_runner(config: EngineConfig, runner: Runner, **options: Any) -> Engine:
    """An engine on any runner, with a prefix cache over its blocks.

    Args:
        options: further arguments of `Engine`; without `events`, what `config.kv_events` names is opened.
    """
    if options.get("events") is None:
        options["events"] = open_events(config.kv_events)
    cache = PrefixCache(
        runner.num_blocks,
        runner.block_size,
        config.eviction_policy,
        enabled=config.enable_prefix_caching,
        ghost_blocks=config.ghost_blocks,
        pin_budget=config.pin_budget,
        model=options.get("model_fingerprint", ""),
        observer=Advisor(runner.block_size),
    )
    return Engine(config, runner=runner, cache=cache, **options)


def summarize(engine: Engine, phases: StartupPhases) -> EngineSummary:
    """The figures of the banner."""
    runner = engine.runner
    return EngineSummary(
        model=engine.model_name,
        backend=runner.backend_name,
        dtype=runner.dtype_name,
        device=runner.device_name,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        kv_tokens=runner.num_blocks * runner.block_size,
        kv_bytes=runner.num_blocks * runner.bytes_per_block,
        max_model_len=engine.limits.max_model_len,
        phases=phases,
    )
