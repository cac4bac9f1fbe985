# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a few layers of families that people serve: fused, and as transformers wrote them.

The models have published shapes, four layers and random weights. Both ways go through the engine's model
runner and its recorded steps: what differs is the number of kernels, and what each of them does.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from benchmarks.gpu_layers import TOY, PublishedShape
from benchmarks.gpu_machine import read_rate
from benchmarks.gpu_parts import Report
from benchmarks.gpu_steps import EngineStep, loaded_model, timed, unfused
from benchmarks.paged_bench import Sizes, profiled

LAYERS = 4
#: Requests of a decode step, and tokens of each.
LOADS, CONTEXT = (1, 32), 2048


def _dense(
    hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        **more,
    }


FAMILIES: dict[str, PublishedShape] = {
    "Qwen3-8B": PublishedShape("qwen3", 36, _dense(4096, 32, 8, 12288, 151936, head_dim=128), TOY),
    "Gemma-3-4B": PublishedShape("gemma3_text", 34, _dense(2560, 8, 4, 10240, 262208, head_dim=256), TOY),
    "OLMo-2-7B": PublishedShape("olmo2", 32, _dense(4096, 32, 32, 11008, 100352), TOY),
    "GLM-4-9B": PublishedShape(
        "glm4", 40, _dense(4096, 32, 2, 13696, 151552, head_dim=128), TOY | {"pad_token_id": 0}
    ),
    "Command-R7B": PublishedShape("cohere2", 32, _dense(4096, 32, 8, 14336, 256000, head_dim=128), TOY),
}


def fused(sizes: Sizes, report: Report) -> None:
    """A line for each family and number of requests; a family that fails is a line, and the next one runs."""
    read = read_rate(sizes)
    for name, shape in FAMILIES.items():
        try:
            found: dict[int, dict[str, Any]] = {}
            # Plain first: a runner rewrites its model's layers for good.
            for way in ("plain", "fused"):
                loaded = loaded_model(shape.model(LAYERS, sizes), name)
                for requests in LOADS[-1:] if sizes.small else LOADS:
                    found.setdefault(requests, {}).update(_step(loaded, requests, way, sizes, read))
                del loaded
                gc.collect()
            for requests, fields in found.items():
                ratio = fields["plain ms"] / fields["fused ms"]
                report(
                    load=f"{name}, {LAYERS} layers, {requests} decodes", **fields, **{"times as fast": ratio}
                )
        except Exception as error:
            report(load=name, ok=False, error=f"{type(error).__name__}: {str(error)[:400]}")
        if sizes.device.type == "cuda":
            torch.cuda.empty_cache()


def _step(loaded: Any, requests: int, way: str, sizes: Sizes, read: float) -> dict[str, Any]:
    """Milliseconds of a step, its kernels, and its time over that of one reading of what it reads."""
    if sizes.small:
        requests = 2
    context = 40 if sizes.small else CONTEXT
    if way == "plain":
        with unfused():
            step = EngineStep(loaded, requests, context, 0)
    else:
        step = EngineStep(loaded, requests, context, 0)
    ms = timed(step.run, sizes.device, min(sizes.rounds, 10))
    kernels = sum(one.calls for one in profiled(step.run, sizes, 1))
    over = ms / (step.bytes_read / read * 1e3)
    return {f"{way} ms": ms, f"{way} kernels": kernels, f"{way} over one reading": over}
