# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second of a whole engine, alone in a process: radixkv, or transformers in two ways.

All serve the same random weights (Llama-3.1-8B's shape in bfloat16 on a GPU), the same prompts, greedily, 64
requests at a time:

- shared prefix: 128 requests, 2,048 tokens common to all, 128 of their own, 64 new. Target: 3 times.
- nothing shared: 128 requests of 512 tokens, 64 new. Target: 1.5 times.

transformers chooses its attention (`paged|flash_...` where a flash kernel is installed, else `paged|sdpa`),
CUDA graphs and asynchronous batching by itself, and shares prefixes of whole pages (`allow_block_sharing`).

`generate` is what most programs call: transformers' own loop over static batches of 1, 8 and 32 requests, of
which a few are measured. It computes a shared prefix again for each.

A round of other prompts first warms compilers, captures and memory up; then rounds with new prompts every
time, and the median counts. Start-up is not in the figure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
import zlib
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts import Report
from benchmarks.gpu_steps import SHAPES, TOY_SHAPES, engine_config, loaded_model, random_model
from benchmarks.paged_bench import Sizes
from radixkv import LLM, SamplingParams
from radixkv.entrypoints.builder import engine_for_model

CONCURRENCY = 64


@dataclasses.dataclass(frozen=True)
class Load:
    """Equal requests: `shared` tokens common to all, `own` of their own, `output` new ones.

    `target`: how many times as fast as transformers.
    """

    name: str
    requests: int
    shared: int
    own: int
    output: int
    target: float

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        common = rng.integers(3, vocab_size, self.shared).tolist()
        return [common + rng.integers(3, vocab_size, self.own).tolist() for _ in range(self.requests)]


LOADS = (
    Load("shared prefix", 128, 2048, 128, 64, 3.0),
    Load("nothing shared", 128, 0, 512, 64, 1.5),
)
TOY_LOADS = (Load("shared prefix", 6, 48, 5, 6, 3.0), Load("nothing shared", 6, 0, 20, 6, 1.5))


class RadixEngine:
    """radixkv, offline."""

    def __init__(self, model: Any, device: torch.device, tokens: int, max_model_len: int, seqs: int) -> None:
        config = engine_config(
            device, num_blocks=tokens // 16, max_num_seqs=seqs, max_model_len=max_model_len
        )
        self.llm = LLM.from_engine(engine_for_model(config, loaded_model(model, "random")))

    def generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, params)]

    attention = "radixkv"

    def close(self) -> None:
        """Free it."""
        self.llm.close()
        del self.llm


class TransformersEngine:
    """transformers' continuous batching; its manager runs from the first request to `close`."""

    def __init__(self, model: Any, device: torch.device, tokens: int, load: Load, seqs: int) -> None:
        # Not in every version of transformers.
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        settings: dict[str, Any] = {"max_requests_per_batch": seqs}
        if device.type == "cpu":
            # Sizes are inferred from a GPU's memory only.
            settings |= {"page_size": 16, "num_blocks": tokens // 16, "max_batch_tokens": 256}
        else:
            settings |= {"max_memory_percent": 0.6}
        self.model = model
        self._stack = contextlib.ExitStack()
        self._manager = self._stack.enter_context(
            model.continuous_batching_context_manager(
                generation_config=GenerationConfig(
                    max_new_tokens=load.output, do_sample=False, eos_token_id=-1, pad_token_id=0
                ),
                continuous_batching_config=ContinuousBatchingConfig(**settings),
                workload_hints=WorkloadHints(load.shared + load.own, load.output, load.requests),
            )
        )

    def generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        ids = self._manager.add_requests(inputs=prompts, max_new_tokens=output)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(ids):
            result = self._manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"transformers stopped: {'no result' if result is None else result.error}")
            if result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
        return [answers[request_id] for request_id in ids]

    @property
    def attention(self) -> str:
        """What it chose."""
        return str(self.model.config._attn_implementation)

    def close(self) -> None:
        """Stop the manager's thread and free its cache."""
        self._stack.close()


class StaticBatches:
    """transformers' `generate`, a batch of equally long prompts after the other."""

    attention = "generate"

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self._batch = model, batch

    def generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in range(0, len(prompts), self._batch):
            ids = torch.tensor(prompts[start : start + self._batch], device=self.model.device)
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
            )
            answers += found[:, ids.shape[1] :].tolist()
        return answers

    def close(self) -> None:
        """Nothing of it stays."""


#: Requests of a static batch.
STATIC_BATCHES = (1, 8, 32)


def generate(sizes: Sizes, report: Report) -> None:
    """Per load and size of static batches: output tokens/s of two batches, after one to warm up."""
    name, shape = next(iter((TOY_SHAPES if sizes.small else SHAPES).items()))
    dtype = torch.float32 if sizes.device.type == "cpu" else torch.bfloat16
    model = random_model(shape, sizes.device, dtype)
    for load in TOY_LOADS if sizes.small else LOADS:
        for batch in (1, 2) if sizes.small else STATIC_BATCHES:
            few = dataclasses.replace(load, requests=batch)
            speeds, _ = serve(few, StaticBatches(model, batch), shape[1]["vocab_size"], 1 if batch > 1 else 2)
            report(
                load=f"{name}, {load.name}",
                **{"static batch": batch, "tokens/s": statistics.median(speeds), "target": load.target},
            )


def throughput(sizes: Sizes, report: Report, engine: str) -> None:
    """Per load: output tokens/s, and a checksum of each answer of the last round.

    Random weights in bfloat16 have near ties, after which two correct engines part: only in float32, at toy
    size, all answers must be equal.
    """
    name, shape = next(iter((TOY_SHAPES if sizes.small else SHAPES).items()))
    device, rounds = sizes.device, 1 if sizes.small else 2
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for load in TOY_LOADS if sizes.small else LOADS:
        model = random_model(shape, device, dtype)
        longest = load.shared + load.own + load.output
        seqs = min(CONCURRENCY, load.requests)
        # Room for everything that runs at once, and for the prefixes of all rounds.
        tokens = (seqs * longest + (rounds + 1) * load.shared + 16 * seqs) // 16 * 16
        served: RadixEngine | TransformersEngine
        if engine == "radixkv":
            served = RadixEngine(model, device, tokens, longest + 16, seqs)
        else:
            served = TransformersEngine(model, device, tokens, load, seqs)
        try:
            speeds, answers = serve(load, served, shape[1]["vocab_size"], rounds)
        finally:
            served.close()
        checksums = [zlib.crc32(np.array(answer, np.int64).tobytes()) for answer in answers]
        report(
            load=f"{name}, {load.name}",
            **{"tokens/s": statistics.median(speeds), "attention": served.attention, "target": load.target},
            checksums=checksums,
        )
        # Two models do not fit beside their K/V.
        del model, served


def serve(
    load: Load, engine: RadixEngine | TransformersEngine | StaticBatches, vocab_size: int, rounds: int
) -> tuple[list[float], list[list[int]]]:
    """Round after round on new prompts, the first not counted: tokens/s, and the last answers."""
    speeds = []
    for seed in range(rounds + 1):
        prompts = load.prompts(vocab_size, seed)
        start = time.perf_counter()
        answers = engine.generate(prompts, load.output)
        seconds = time.perf_counter() - start
        lengths = {len(tokens) for tokens in answers}
        if len(answers) != load.requests or lengths != {load.output}:
            raise RuntimeError(f"{len(answers)} answers of {lengths} tokens")
        if seed:
            speeds.append(load.requests * load.output / seconds)
    return speeds, answers
