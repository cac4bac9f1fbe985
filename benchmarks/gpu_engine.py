"""Decode steps of whole models on a GPU: random weights, paged attention, one CUDA graph per step.

Called by `python -m benchmarks.gpu`. The models are bare: norms, rotary embedding, attention, MLP and the
output projection at the published shapes, in bfloat16. They show what the kernels allow around attention;
the engine's own overhead (scheduling, sampling, detokenisation) is not in here.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np
import torch

from radixkv_kernels import KVSpec, PagedKV, make_backend


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's shape."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int


SHAPES = {
    "Llama-3.1-8B": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936),
    "SmolLM2-135M": Shape(30, 576, 9, 3, 64, 1536, 49152),
}


class BareModel:
    """One decode step: token embeddings to logits, keys and values through the paged cache."""

    def __init__(
        self, shape: Shape, device: torch.device, batch: int, context: int, shared: int, block: int = 16
    ) -> None:
        self.shape, self.device, self.batch = shape, device, batch
        s = shape
        blocks, common = -(-context // block), shared // block
        total = common + batch * (blocks - common)
        spec = KVSpec(s.layers, total, block, s.kv_heads, s.head_size, torch.bfloat16, device)
        self.kv = PagedKV(spec)
        for tensor in self.kv.tensors():
            tensor.normal_()
        self.backend = make_backend(
            "triton",
            num_query_heads=s.heads,
            spec=spec,
            compute_dtype=torch.bfloat16,
            max_num_tokens=max(batch, 16),
            max_num_seqs=batch,
            max_model_len=context,
        )
        ids = np.random.default_rng(0).permutation(total).astype(np.int32)
        own = blocks - common
        tables = [
            np.concatenate([ids[:common], ids[common + r * own : common + (r + 1) * own]])
            for r in range(batch)
        ]
        self.plan = self.backend.plan(np.arange(batch + 1), np.full(batch, context), tables)
        last = [int(t[(context - 1) // block]) * block + (context - 1) % block for t in tables]
        self.slots = torch.tensor(last, device=device)
        self.context, self.own_tokens, self.shared = context, context - shared, shared

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5

        width = (s.heads + 2 * s.kv_heads) * s.head_size
        self.layers = [
            (weight(width, s.hidden), weight(s.hidden, s.heads * s.head_size), weight(2 * s.mlp, s.hidden),
             weight(s.hidden, s.mlp))
            for _ in range(s.layers)
        ]  # fmt: skip
        self.head = weight(s.vocabulary, s.hidden)
        angles = context * 10000.0 ** (-torch.arange(0, s.head_size, 2, device=device) / s.head_size)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.hidden = torch.randn(batch, s.hidden, device=device, dtype=torch.bfloat16)
        self.out = torch.empty(batch, s.heads, s.head_size, device=device, dtype=torch.bfloat16)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)

    def step(self) -> torch.Tensor:
        s, x = self.shape, self.hidden
        sizes = (s.heads, s.kv_heads, s.kv_heads)
        for layer, (qkv, output, up, down) in enumerate(self.layers):
            h = torch.nn.functional.rms_norm(x, (s.hidden,))
            q, k, v = torch.nn.functional.linear(h, qkv).view(self.batch, -1, s.head_size).split(sizes, dim=1)
            self.backend.write(self.kv, layer, self.rotate(k), v, self.slots)
            attended = self.backend.attend(
                self.kv, layer, self.rotate(q), self.plan, scale=s.head_size**-0.5, out=self.out
            )
            x = x + torch.nn.functional.linear(attended.view(self.batch, -1), output)
            h = torch.nn.functional.rms_norm(x, (s.hidden,))
            gate, value = torch.nn.functional.linear(h, up).chunk(2, dim=-1)
            x = x + torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, down)
        return torch.nn.functional.linear(x, self.head)

    def bytes_read(self) -> float:
        """Weights once, each request's own keys and values once, the shared ones once."""
        weights = sum(w.nbytes for layer in self.layers for w in layer) + self.head.nbytes
        return weights + self.kv.spec.bytes_per_slot * (self.own_tokens * self.batch + self.shared)


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.empty(2 << 30 if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source), device, 5) / 1e3)


def timed(run: Any, device: torch.device, rounds: int) -> float:
    """Median milliseconds."""
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


def decode_steps(device: torch.device, small: bool, rounds: int) -> dict[str, Any]:
    """Per model and load: step time, roofline, and their ratio."""
    speed = copy_speed(device)
    shapes = {"toy": Shape(2, 64, 4, 2, 32, 128, 256)} if small else SHAPES
    loads = [(2, 40, 0)] if small else [(1, 2048, 0), (64, 2048, 0), (64, 8192, 6144)]
    results: dict[str, Any] = {"copy speed, TB/s": speed / 1e12}
    for name, shape in shapes.items():
        for batch, context, shared in loads:
            model = BareModel(shape, device, batch, context, shared)
            run: Any = model.step
            if device.type == "cuda":
                run = captured(model)
            step = timed(run, device, rounds)
            roofline = model.bytes_read() / speed * 1e3
            results[f"{name} {batch} x {context}{f' ({shared} shared)' if shared else ''}"] = {
                "step ms": step,
                "roofline ms": roofline,
                "over": step / roofline,
                "tokens/s": batch / step * 1e3,
            }
            del model, run
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results


def captured(model: BareModel) -> Any:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step()
    return graph.replay
