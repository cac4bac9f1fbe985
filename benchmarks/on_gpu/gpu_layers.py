# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a layer of models that people serve, from random models of 4 and 8 layers.

The models have published shapes (number of layers apart) and random weights, in bfloat16 on a GPU. A step is
`ModelRunner.execute`, as in `gpu_steps`: once eager, and once replayed where the model is recorded.

    slope = (step of 8 layers - step of 4 layers) / 4
    whole = step of 4 layers + (layers of the published model - 4) * slope

`whole` is what a step of the whole model takes, although its weights need not fit beside anything. Layers
come in periods of 1, 2 or 4 (three with a state and one with attention, say), so that 4 more are alike in any
case. Goals are for one H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_parts import Report
from benchmarks.gpu_steps import EngineStep, loaded_model, random_model, timed
from benchmarks.paged_bench import Sizes
from radixkv_kernels.states import GRID

#: Layers of the two models that are compared.
FEW, MORE = 4, 8
ROWS = (1, 32, 128, 256)
#: Tokens of a decode's context: half a ring of the latest inputs lies after the last kept state.
CONTEXT = 2048 - GRID // 2
PROMPT = 8192


@dataclasses.dataclass(frozen=True)
class PublishedShape:
    """A published model.

    Attributes:
        kind: its model type.
        num_layers: of the whole model.
        settings: of its configuration.
        toy: settings for toy sizes.
        goals: rows of a decode step -> most milliseconds of the whole model's.
    """

    kind: str
    num_layers: int
    settings: Mapping[str, Any]
    toy: Mapping[str, Any]
    goals: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def model(self, num_layers: int, sizes: Sizes) -> Any:
        """A random model of so many layers of this shape."""
        settings = {**self.settings, **(self.toy if sizes.small else {}), "num_hidden_layers": num_layers}
        dtype = torch.bfloat16 if sizes.device.type == "cuda" else torch.float32
        return random_model((self.kind, settings), sizes.device, dtype)


TOY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 256,
}
_TOY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

PUBLISHED: dict[str, PublishedShape] = {
    "Llama-3.1-8B": PublishedShape(
        "llama",
        32,
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
        TOY,
        {1: 5.3},
    ),
    "Qwen3-30B-A3B": PublishedShape(
        "qwen3_moe",
        48,
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "vocab_size": 151936,
        },
        TOY | _TOY_EXPERTS | {"num_experts": 4},
        {1: 5.5, 32: 17, 128: 25},
    ),
    "Qwen3.5-35B-A3B": PublishedShape(
        "qwen3_5_moe_text",
        40,
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 248320,
        },
        TOY
        | _TOY_EXPERTS
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        {1: 7, 128: 20},
    ),
    "gpt-oss-20b": PublishedShape(
        "gpt_oss",
        24,
        {
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
        },
        TOY | {"num_local_experts": 4, "num_experts_per_tok": 2},
        {1: 3.2, 32: 6, 128: 8},
    ),
    "DeepSeek-V2-Lite": PublishedShape(
        "deepseek_v2",
        27,
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "head_dim": 64,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
        },
        TOY
        | _TOY_EXPERTS
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
        },
    ),
}


def layers(sizes: Sizes, report: Report, name: str) -> None:
    """One line for each load and way of running it; a load that fails is a line, and the next one runs."""
    shape = PUBLISHED[name]
    # Rows, and tokens of each: of the request's context they are the last.
    loads = [(2, 1), (1, 24)] if sizes.small else [*((rows, 1) for rows in ROWS), (1, PROMPT)]
    found: dict[tuple[int, int], dict[str, dict[int, float]]] = {load: {} for load in loads}
    for num_layers in (FEW, MORE):
        loaded = None
        for load in loads:
            try:
                if loaded is None or sizes.device.type == "cpu":  # where a runner packs its model's weights
                    loaded = loaded_model(shape.model(num_layers, sizes), name)
                for way, ms in step_times(loaded, *load, sizes).items():
                    found[load].setdefault(way, {})[num_layers] = ms
            except Exception as error:
                said = f"{type(error).__name__}: {str(error)[:400]}"
                report(load=describe(name, load), layers=num_layers, ok=False, error=said)
                continue
            for way, times in found[load].items():
                if num_layers == MORE and len(times) == 2:
                    report(load=describe(name, load), way=way, **slope(shape, load, way, times))
        # Two models do not fit beside their K/V.
        del loaded
        if sizes.device.type == "cuda":
            torch.cuda.empty_cache()


def describe(name: str, load: tuple[int, int]) -> str:
    """The name of a load: a prompt, or a decode step of some rows."""
    requests, rows = load
    return f"{name}, prompt of {rows}" if rows > 1 else f"{name}, {requests} decodes"


def step_times(loaded: Any, requests: int, rows: int, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of a step: eager, and replayed if the runner records it."""
    is_prompt = rows > 1
    context = rows if is_prompt else (GRID + 8 if sizes.small else CONTEXT)
    step = EngineStep(loaded, requests, context, 0, rows, is_prompt=is_prompt)
    graphs, rounds = step.runner.graphs, min(sizes.rounds, 10)
    step.runner.graphs = None
    times = {"eager": timed(step.run, sizes.device, rounds)}
    if graphs is not None and not is_prompt:
        step.runner.graphs = graphs
        ms = timed(step.run, sizes.device, rounds)
        if graphs.replayed:
            times["replayed"] = ms
    return times


def slope(
    shape: PublishedShape, load: tuple[int, int], way: str, times: Mapping[int, float]
) -> dict[str, Any]:
    """What two models' times say about a layer and about the whole model."""
    each = (times[MORE] - times[FEW]) / (MORE - FEW)
    whole = times[FEW] + (shape.num_layers - FEW) * each
    fields: dict[str, Any] = {
        f"ms of {FEW} layers": times[FEW],
        f"ms of {MORE} layers": times[MORE],
        "us a layer": 1e3 * each,
        f"ms of {shape.num_layers} layers": whole,
    }
    requests, rows = load
    if rows > 1:
        fields["tokens/s"] = requests * rows / whole * 1e3
    elif way == "replayed" and requests in shape.goals:
        fields |= {"target": shape.goals[requests], "met": whole <= shape.goals[requests]}
    return fields
