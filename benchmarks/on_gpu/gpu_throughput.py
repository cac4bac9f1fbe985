"""Output tokens per second of the whole engine beside transformers' own continuous batching, in one run.

Called by `python -m benchmarks.gpu`. Both serve the same random weights (Llama-3.1-8B's shape in bfloat16 on
a GPU), the same prompts, greedily, 64 requests at a time:

- shared prefix: 128 requests, 2,048 tokens common to all, 128 of their own, 128 new. Target: 3 times.
- nothing shared: 128 requests of 512 tokens, 128 new. Target: 1.5 times.

transformers chooses its attention (`paged|flash_...` where a flash kernel is installed, else `paged|sdpa`),
CUDA graphs and asynchronous batching by itself, and shares prefixes of whole pages (`allow_block_sharing`).
Each engine serves a round of other prompts first, which warms compilers, captures and memory up; then rounds
alternate, with new prompts every time, and the median counts. Start-up is in neither figure.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_engine import SHAPES, TOY_SHAPES, engine_config, loaded_model, random_model
from radixkv import LLM, SamplingParams
from radixkv.engine.builder import engine_for_model

CONCURRENCY = 64


@dataclasses.dataclass(frozen=True)
class Load:
    """Equal requests: `shared` tokens common to all, `own` of their own, `output` new ones."""

    name: str
    requests: int
    shared: int
    own: int
    output: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        common = rng.integers(3, vocab_size, self.shared).tolist()
        return [common + rng.integers(3, vocab_size, self.own).tolist() for _ in range(self.requests)]


LOADS = (
    Load("shared prefix", 128, 2048, 128, 128),
    Load("nothing shared", 128, 0, 512, 128),
)
TOY_LOADS = (Load("shared prefix", 6, 48, 5, 6), Load("nothing shared", 6, 0, 20, 6))


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


class TransformersEngine:
    """transformers' continuous batching; its manager runs from the first request to `close`."""

    def __init__(self, model: Any, device: torch.device, tokens: int, load: Load, seqs: int) -> None:
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


def compare(device: torch.device, small: bool, rounds: int = 3) -> dict[str, Any]:
    """Per load: output tokens/s of both, their ratio, the share of equal tokens, and the peer's attention.

    Random weights in bfloat16 have near ties, after which two correct engines part: in float32 at toy size,
    all tokens must agree.
    """
    name, shape = next(iter((TOY_SHAPES if small else SHAPES).items()))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = random_model(shape, device, dtype)
    results: dict[str, Any] = {}
    for load in TOY_LOADS if small else LOADS:
        longest = load.shared + load.own + load.output
        seqs = min(CONCURRENCY, load.requests)
        # Room for everything that runs at once, and for the prefixes of all rounds.
        tokens = (seqs * longest + (rounds + 1) * load.shared + 16 * seqs) // 16 * 16
        peer = TransformersEngine(copy.deepcopy(model), device, tokens, load, seqs)
        ours = RadixEngine(copy.deepcopy(model), device, tokens, longest + 16, seqs)
        try:
            row = alternate(load, ours, peer, shape[1]["vocab_size"], rounds)
            results[f"{name}, {load.name}, beside {peer.attention}"] = row
        finally:
            peer.close()
        del ours, peer
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def alternate(
    load: Load, ours: RadixEngine, peer: TransformersEngine, vocab_size: int, rounds: int
) -> dict[str, float]:
    """Round after round on new prompts; the first is not counted."""
    speeds: dict[str, list[float]] = {"radixkv": [], "transformers": []}
    equal = total = 0
    for seed in range(rounds + 1):
        prompts = load.prompts(vocab_size, seed)
        answers = {}
        for name, engine in (("radixkv", ours), ("transformers", peer)):
            start = time.perf_counter()
            answers[name] = engine.generate(prompts, load.output)
            seconds = time.perf_counter() - start
            lengths = {len(tokens) for tokens in answers[name]}
            if len(answers[name]) != load.requests or lengths != {load.output}:
                raise RuntimeError(f"{name} gave {len(answers[name])} answers of {lengths} tokens")
            if seed:
                speeds[name].append(load.requests * load.output / seconds)
        for a, b in zip(answers["radixkv"], answers["transformers"], strict=True):
            equal += sum(x == y for x, y in zip(a, b, strict=True))
            total += load.output
    medians = {f"{name} tokens/s": statistics.median(values) for name, values in speeds.items()}
    ratio = medians["radixkv tokens/s"] / medians["transformers tokens/s"]
    return medians | {"times as fast": ratio, "equal tokens": equal / total}
