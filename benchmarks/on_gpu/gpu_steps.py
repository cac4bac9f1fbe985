# SPDX-License-Identifier: Apache-2.0
"""Steps of whole models through the engine's own model runner: milliseconds, and where they go.

The model has a published shape and random weights. A step is `ModelRunner.execute` as the engine calls it:
the plan on the host, the copy of inputs and plan, the replay of the CUDA graph with attention inside.
Scheduling and sampling are not in here.

The roofline of a decode is what must be read from memory at least, at the speed of a large sum in the same
run: the weights once, each request's own keys and values once, shared ones once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu_graphs import recording
from benchmarks.gpu_machine import read_rate
from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import BLOCK, Sizes, profiled
from radixkv.engine.config import EngineConfig
from radixkv.model.attention.attention_hook import ATTENTION_NAME, PlainCausalStep, register_attention_hook
from radixkv.model.attention.attention_shape import AttentionShape, shape_of_calls
from radixkv.model.attention.latent_attention import absorb_latents
from radixkv.model.loading.loader import LoadedModel
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.model.state_layers.registry import install_mixers
from radixkv.model.step_context import call_model
from radixkv.scheduling.batch import Batch, BatchStates
from radixkv.text.tokenizer import Tokenizer
from radixkv_kernels.states import GRID, StateSpec

#: Name -> model type and what its configuration says.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
    ),
}
TOY_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "toy": (
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 256,
        },
    ),
}


def random_model(shape: tuple[str, dict[str, Any]], device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers model with random weights, made on the device."""
    kind, settings = shape
    config = AutoConfig.for_model(kind, max_position_embeddings=32768, **settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """A word for every id, so that any id can be turned into text."""
    words = {f"w{i}": i for i in range(vocab_size)}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Backend(WordLevel(words, unk_token="w0"))))


def loaded_model(model: Any, name: str) -> LoadedModel:
    """A random model as `load_model` would hand it out; its attention goes through the hook from now on."""
    model.set_attn_implementation(register_attention_hook())
    absorb_latents(model, ATTENTION_NAME)
    config = model.config
    return LoadedModel(
        model=model,
        tokenizer=word_tokenizer(config.vocab_size),
        hf_config=config,
        name=name,
        dtype=model.dtype,
        device=model.device,
        attention=layers_of(model),
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        fingerprint="random",
        default_sampling={},
    )


@torch.no_grad()
def layers_of(model: Any) -> AttentionShape:
    """Heads, windows and states of a model's layers, by a dry run through the hook."""
    install_mixers(model)
    positions = torch.arange(8, device=model.device)
    step = PlainCausalStep(positions)
    call_model(model, positions + 3, positions, None, step)
    return shape_of_calls(step.calls, None, step.states.shapes, step.windows)


def engine_config(device: torch.device, **options: Any) -> EngineConfig:
    """Settings of an engine around a random model."""
    return EngineConfig(model="random", device=device.type, block_size=BLOCK, **options)


class EngineStep:
    """A step over the last `rows` tokens of each of `batch` requests of `context` tokens, `shared` in common.

    Args:
        rows: one for a decode; more for a decode with drafts, or for a prompt.
        is_prompt: only the logits of the last row are wanted.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        batch: int,
        context: int,
        shared: int,
        rows: int = 1,
        *,
        is_prompt: bool = False,
    ) -> None:
        blocks, common = -(-context // BLOCK), shared // BLOCK
        own = blocks - common
        total = common + batch * own
        spec = loaded.attention.layout(total, BLOCK, loaded.dtype, loaded.device)
        # Counted before the runner packs them.
        weights = sum(p.nbytes for p in {id(p): p for p in loaded.model.parameters()}.values())
        embedding = loaded.model.get_input_embeddings().weight
        if loaded.model.get_output_embeddings().weight is not embedding:
            # A step looks up a few rows of it only.
            weights -= embedding.nbytes
        shapes = loaded.attention.states
        self.runner = ModelRunner(
            loaded,
            spec,
            StepLimits(max(batch * rows, 16), batch, blocks * BLOCK),
            backend="triton" if loaded.device.type == "cuda" else "cpu",
            states=StateSpec(shapes, 2 * batch, batch, keeps_values=True) if shapes else None,
        )
        for tensor in self.runner.kv.tensors():
            tensor.normal_()
        ids = np.random.default_rng(0).permutation(total).astype(np.int32)
        self.tables = [
            np.concatenate([ids[:common], ids[common + r * own : common + (r + 1) * own]])
            for r in range(batch)
        ]
        self.context = context
        self.rows, self.is_prompt = rows, is_prompt
        self.bytes_read = weights + spec.bytes_per_slot * ((context - shared) * batch + shared)
        if self.runner.states is not None:
            self._fill_rings()

    def run(self) -> torch.Tensor:
        """One step; the same one every time, so that it overwrites its own token."""
        requests, own = len(self.tables), np.arange(self.context - self.rows, self.context, dtype=np.int64)
        count = requests * self.rows
        wanted = np.arange(self.rows - 1 if self.is_prompt else 0, count, self.rows if self.is_prompt else 1)
        slots = [table[own // BLOCK].astype(np.int64) * BLOCK + own % BLOCK for table in self.tables]
        batch = Batch(
            entries=[],
            token_ids=np.arange(count, dtype=np.int64),
            positions=np.tile(own, requests),
            query_starts=np.arange(0, count + 1, self.rows, dtype=np.int32),
            context_lengths=np.full(requests, self.context, np.int32),
            block_tables=self.tables,
            write_slots=np.concatenate(slots),
            write_rows=None,
            logit_rows=wanted.astype(np.int64),
            copy_groups=[],
            states=self._states() if self.runner.states is not None else None,
        )
        return self.runner.execute(batch)

    def _fill_rings(self) -> None:
        """Start from zero states, and decode the tokens between them and the step."""
        states, context, rows = self.runner.states, self.context, self.rows
        assert states is not None
        slots = range(states.num_slots)
        states.load(slots, [bytes(states.bytes_per_slot)] * len(slots))
        start, graphs = context - rows, self.runner.graphs
        self.rows, self.runner.graphs = 1, None
        for self.context in range(start // GRID * GRID + 1, start + 1):
            self.run()
        self.context, self.rows, self.runner.graphs = context, rows, graphs

    def _states(self) -> BatchStates:
        """States at the grid points before and in the step; a ring holds the tokens between."""
        requests, start = len(self.tables), self.context - self.rows
        base, target = start // GRID * GRID, (self.context - 1) // GRID * GRID
        states, each = BatchStates.empty(requests), np.arange(requests, dtype=np.int32)
        states.ring_rows[:] = each
        states.base_positions[:], states.target_positions[:] = base, max(base, target)
        if base:
            states.base_slots[:] = each
        if target > base:
            states.target_slots[:] = requests + each
        return states


def unfused() -> AbstractContextManager[Any]:
    """Let runners that are made meanwhile keep the layers as transformers wrote them."""
    return patch("radixkv.model.rewritten_model.rewrite_layers", lambda *_: None)


def timed(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Median milliseconds, after three runs to warm up: eager, captured, replayed."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def steps(sizes: Sizes, report: Report) -> None:
    """Decodes, decodes on a shared prefix, a prompt, drafts; kernels that take the most time; recordings."""
    name, shape = next(iter((TOY_SHAPES if sizes.small else SHAPES).items()))
    dtype = torch.bfloat16 if sizes.device.type == "cuda" else torch.float32
    speed = read_rate(sizes)
    loaded = loaded_model(random_model(shape, sizes.device, dtype), name)
    # Requests, context, of which shared, rows of each, and whether these are a prompt.
    loads = [
        (1, 2048, 0, 1, False),
        (32, 2048, 0, 1, False),
        (128, 2048, 0, 1, False),
        (64, 8192, 6144, 1, False),
        (1, 8192, 0, 8192, True),
        (1, 2048, 0, 4, False),
        (1, 2048, 0, 16, False),
        (64, 2048, 0, 4, False),
    ]
    if sizes.small:
        loads = [(2, 40, 0, 1, False), (1, 40, 0, 40, True), (2, 40, 32, 3, False)]
    # First, since a runner rewrites its model's layers for good.
    with unfused():
        for batch, context, *_ in loads[: 1 if sizes.small else 2]:
            step = EngineStep(loaded, batch, context, 0)
            milliseconds = timed(step.run, sizes.device, sizes.rounds)
            report(
                load=f"{name} decode {batch} x {context}, layers as transformers wrote them", ms=milliseconds
            )
            top_kernels(step, "decode, layers as transformers wrote them", sizes, report)
            del step
    for batch, context, shared, rows, is_prompt in loads:
        if sizes.device.type == "cpu":  # where a runner packs its model's weights
            loaded = loaded_model(random_model(shape, sizes.device, dtype), name)
        step = EngineStep(loaded, batch, context, shared, rows, is_prompt=is_prompt)
        milliseconds = timed(step.run, sizes.device, sizes.rounds)
        kind = "prompt" if is_prompt else "decode"
        fields: dict[str, Any] = {"ms": milliseconds, "tokens/s": batch * rows / milliseconds * 1e3}
        if not is_prompt:
            roofline = step.bytes_read / speed * 1e3
            fields |= {"over roofline": milliseconds / roofline}
            if step.runner.graphs is not None:
                fields |= {"replays": step.runner.graphs.replayed}
        report(load=f"{name} {kind} {batch} x {context}, {shared} shared, {rows} rows", **fields)
        if is_prompt or (batch, rows) == (2 if sizes.small else 32, 1):
            top_kernels(step, kind, sizes, report)
        # Two engines' K/V do not fit.
        del step
    if sizes.device.type == "cpu":
        loaded = loaded_model(random_model(shape, sizes.device, dtype), name)
    recording(loaded, lambda run: timed(run, sizes.device, sizes.rounds), sizes, report)


def top_kernels(step: EngineStep, kind: str, sizes: Sizes, report: Report) -> None:
    """The 15 kernels (on a CPU: operators) with the most time in a step."""
    kernels = profiled(step.run, sizes)
    total = sum(one.microseconds for one in kernels)
    report(profiled=kind, kernels_per_step=sum(one.calls for one in kernels), ms_per_step=total / 1e3)
    for one in kernels[:15]:
        fields = {"us_per_step": one.microseconds, "calls_per_step": one.calls}
        report(kernel=one.name[:120], of=kind, **fields, share=one.microseconds / total)
