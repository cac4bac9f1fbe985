# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets on this CPU: one layer beside transformers' fallback, a whole model beside a plain one.

    python -m benchmarks.state_layers [--part layer|model] [--rounds N] [--json FILE]

layer: decode of one token in 18 layers, each with a state of its own, and prefill of 512 in one, at the heads
of Qwen3.5-0.8B and 4B; transformers' functions, and sums over as many bytes as a decode must read (the state
and half a ring), take turns with ours. Decode's times are those of one layer.
model: a step of random models of the same number of weights, layers as wide as Qwen3.5-0.8B's: three delta
nets and one attention layer, and four attention layers.

One thread; times are its CPU time, medians over rounds, so that other programs disturb little.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from benchmarks.figures import write_figures
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine
from radixkv.sampling.sampling_params import SamplingParams
from radixkv_kernels.cpu.recurrence.backend import CpuStates
from radixkv_kernels.state_interface import StatePlan, plan_states
from radixkv_kernels.states import GRID, PagedStates, StateShape, StateSpec
from tests.support.tiny_models import byte_level_tokenizer

#: Model -> key heads, value heads; keys and values have 128 elements.
HEADS = {"Qwen3.5-0.8B": (16, 16), "Qwen3.5-4B": (16, 32)}
SIZE = 128
PROMPT = 512
DELTA_LAYERS = 18  # of Qwen3.5-0.8B
_LAYERS = 4  # of the whole models
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": _LAYERS,
    "head_dim": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
#: Name -> model type and configuration; the plain one has about as many weights.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": (
        "qwen3_5_text",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": SIZE,
            "linear_value_head_dim": SIZE,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
    "plain": ("qwen3", {"num_attention_heads": 16, "num_key_value_heads": 4}),
}


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of CPU time of each call, one after the other in every round, after one that is not
    counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            if turn:
                times[name].append(time.thread_time() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def layer(key_heads: int, value_heads: int, rounds: int) -> dict[str, Any]:
    """Times of one layer's delta rule, and ratios."""
    draw = torch.Generator().manual_seed(0)

    def inputs(count: int) -> tuple[torch.Tensor, ...]:
        q, k = (torch.randn(count, key_heads, SIZE, generator=draw) for _ in range(2))
        v = torch.randn(count, value_heads, SIZE, generator=draw)
        decay = -torch.rand(count, value_heads, generator=draw)
        return q, k, v, decay, torch.rand(count, value_heads, generator=draw)

    shape = StateShape(0, "delta", (key_heads, value_heads, SIZE, SIZE))
    spec = StateSpec(tuple([replace(shape, layer=at) for at in range(DELTA_LAYERS)]), 2, 1)
    memory, backend = PagedStates(spec), CpuStates()
    row = np.zeros(1, np.int32)

    def plan(count: int, start: int, base: int) -> StatePlan:
        target = max(base, (start + count - 1) // GRID * GRID)
        slots = np.array([0 if base else -1]), np.array([1 if target > base else -1])
        places = np.array([start]), slots[0], np.array([base]), row, slots[1], np.array([target])
        return plan_states(spec, np.array([0, count]), *places)

    states = [torch.randn(1, value_heads, SIZE, SIZE, generator=draw) for _ in range(DELTA_LAYERS)]
    token, prompt = inputs(1), inputs(PROMPT)
    for each, state in zip(memory.layers(), states, strict=True):
        each.slots[0].copy_(state[0])
        for ring in each.rings:
            ring.zero_()
    batched = {len(each[0]): tuple(part[None] for part in each) for each in (token, prompt)}

    def theirs(count: int, function: Callable[..., Any], state: torch.Tensor) -> Any:
        q, k, v, decay, beta = batched[count]
        return function(
            q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    layer = replace(spec, shapes=(shape,))
    needed = layer.bytes_per_slot + layer.bytes_per_ring // 2
    buffers = [torch.ones(needed // 4) for _ in range(DELTA_LAYERS)]
    one, many = plan(1, GRID + GRID // 2, GRID), plan(PROMPT, 0, 0)

    def decode() -> None:
        for at in range(DELTA_LAYERS):
            backend.mix(memory, at, "delta", one, token)

    def decode_theirs() -> None:
        for state in states:
            theirs(1, torch_recurrent_gated_delta_rule, state)

    def read() -> None:
        for buffer in buffers:
            buffer.sum()

    times = in_turns(
        {
            "decode": decode,
            "decode, transformers": decode_theirs,
            "decode, its bytes": read,
            "prefill": lambda: backend.mix(memory, 0, "delta", many, prompt),
            "prefill, transformers": lambda: theirs(PROMPT, torch_chunk_gated_delta_rule, states[0]),
        },
        rounds,
    )
    times = {name: each / (DELTA_LAYERS if "decode" in name else 1) for name, each in times.items()}
    return {
        "seconds": times,
        "decode_over_transformers": times["decode"] / times["decode, transformers"],
        "decode_over_bytes": times["decode"] / times["decode, its bytes"],
        "prefill_speedup": times["prefill, transformers"] / times["prefill"],
        "prefill_tokens_per_s": PROMPT / times["prefill"],
    }


def model(rounds: int, prompt: int = 256, decodes: int = 16) -> dict[str, Any]:
    """Times of whole steps of both models, and their ratio."""
    engines: dict[str, Engine] = {}
    weights: dict[str, int] = {}
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, more) in MODELS.items():
            config = AutoConfig.for_model(kind, **_COMMON, **more)
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            weights[name] = sum(parameter.numel() for parameter in made.parameters())
            made.save_pretrained(f"{folder}/{name}")
            byte_level_tokenizer().save_pretrained(f"{folder}/{name}")
            del made
            options = {"device": "cpu", "dtype": "float32", "num_blocks": 256, "max_num_seqs": 2}
            engines[name] = build_engine(
                EngineConfig.from_options(f"{folder}/{name}", {**options, "threads": 1, "speculation": "off"})
            )

        def prefill(engine: Engine) -> None:
            params = SamplingParams(max_tokens=decodes + 1, temperature=0.0, ignore_eos=True)
            engine.add_request(draw.integers(3, 4096, prompt).tolist(), params)
            engine.step()

        def decode(engine: Engine) -> None:
            while engine.has_work:
                engine.step()

        calls: dict[str, Callable[[], Any]] = {}
        for name, engine in engines.items():
            calls[f"{name}, prefill"] = functools.partial(prefill, engine)
            calls[f"{name}, decode"] = functools.partial(decode, engine)
        times = in_turns(calls, rounds)
    return {
        "weights": weights,
        "seconds": times,
        "prefill_ratio": times["hybrid, prefill"] / times["plain, prefill"],
        "decode_ratio": times["hybrid, decode"] / times["plain, decode"],
        "weights_ratio": weights["hybrid"] / weights["plain"],
    }


def main() -> None:
    """Measure, and print the times and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("layer", "model"), help="one of the two; else both")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    if args.part != "model":
        for name, heads in HEADS.items():
            figures[name] = layer(*heads, args.rounds)
    if args.part != "layer":
        figures["model"] = model(args.rounds)
    table = Table("what", "time", "ratio")
    for name, found in figures.items():
        for what, seconds in found["seconds"].items():
            table.add_row(f"{name}: {what}", f"{1e6 * seconds:,.0f} us", "")
        for what, value in found.items():
            if isinstance(value, float):
                table.add_row(f"{name}: {what}", "", f"{value:.3f}")
    Console().print(table)
    if args.json:
        write_figures(args.json, "state_layers", figures)


if __name__ == "__main__":
    main()
