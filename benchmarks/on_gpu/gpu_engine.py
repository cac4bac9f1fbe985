"""Decode steps of whole models through the engine's own model runner, over their roofline.

Called by `python -m benchmarks.gpu`. The models have published shapes and random weights in bfloat16. A step
is `ModelRunner.execute` as the engine calls it: the plan on the host, the copy of inputs and plan, the replay
of the captured CUDA graph with attention inside. Scheduling and sampling are not in here;
`benchmarks.gpu_throughput` has the whole engine.

The roofline is what must be read from memory at least, at the speed of a large copy in the same run: the
weights once, each request's own keys and values once, shared ones once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from radixkv.config import EngineConfig
from radixkv.model.attention_hook import register_attention_hook
from radixkv.model.loading.loader import LoadedModel
from radixkv.model.runner import ModelRunner
from radixkv.scheduling.batch import Batch
from radixkv.text.tokenizer import Tokenizer
from radixkv_kernels import KVSpec

BLOCK = 16

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
    "Qwen3-0.6B": (
        "qwen3",
        {
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM2-135M": (
        "llama",
        {
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
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
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = shape
    config = AutoConfig.for_model(kind, max_position_embeddings=32768, **settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """A word for every id, so that any id can be turned into text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocab_size)}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Backend(WordLevel(words, unk_token="w0"))))


def loaded_model(model: Any, name: str) -> LoadedModel:
    """A random model as `load_model` would hand it out; its attention goes through the hook from now on."""
    model.set_attn_implementation(register_attention_hook())
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LoadedModel(
        model=model,
        tokenizer=word_tokenizer(config.vocab_size),
        hf_config=config,
        name=name,
        dtype=model.dtype,
        device=model.device,
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size,
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        fingerprint="random",
        default_sampling={},
    )


def engine_config(device: torch.device, **options: Any) -> EngineConfig:
    """Settings of an engine around a random model."""
    return EngineConfig(model="random", device=device.type, block_size=BLOCK, **options)


class DecodeStep:
    """`batch` requests of `context` tokens, of which the first `shared` are common: the last token of each.

    Args:
        drafts: of how many tokens before it the logits are wanted, too: the rows of a speculative step.
    """

    def __init__(self, loaded: LoadedModel, batch: int, context: int, shared: int, drafts: int = 0) -> None:
        blocks, common = -(-context // BLOCK), shared // BLOCK
        own = blocks - common
        total = common + batch * own
        spec = KVSpec(
            loaded.num_layers,
            total,
            BLOCK,
            loaded.num_kv_heads,
            loaded.head_size,
            loaded.dtype,
            loaded.device,
        )
        # Counted before the runner packs them.
        weights = sum(p.nbytes for p in {id(p): p for p in loaded.model.parameters()}.values())
        embedding = loaded.model.get_input_embeddings().weight
        if loaded.model.get_output_embeddings().weight is not embedding:
            # A step looks up a few rows of it only.
            weights -= embedding.nbytes
        self.runner = ModelRunner(
            loaded,
            spec,
            backend="triton" if loaded.device.type == "cuda" else "cpu",
            max_num_tokens=max(batch * (1 + drafts), 16),
            max_num_seqs=batch,
            max_model_len=blocks * BLOCK,
            max_draft_tokens=drafts,
        )
        for tensor in self.runner.kv.tensors():
            tensor.normal_()
        ids = np.random.default_rng(0).permutation(total).astype(np.int32)
        self.tables = [
            np.concatenate([ids[:common], ids[common + r * own : common + (r + 1) * own]])
            for r in range(batch)
        ]
        self.context = context
        self.rows = 1 + drafts
        self.bytes_read = weights + spec.bytes_per_slot * ((context - shared) * batch + shared)

    def run(self) -> torch.Tensor:
        """One step; the same one every time, so that it overwrites its own token."""
        requests, own = len(self.tables), np.arange(self.context - self.rows, self.context, dtype=np.int64)
        count = requests * self.rows
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
            logit_rows=np.arange(count, dtype=np.int64),
            copy_groups=[],
        )
        return self.runner.execute(batch)


def speculative_steps(device: torch.device, small: bool, rounds: int) -> dict[str, Any]:
    """What drafts cost: step time by requests and rows each, in steps of one row, and graph replays.

    The column of one request is what `radixkv.speculation.step_costs` has for a backend.
    """
    name, shape = next(iter((TOY_SHAPES if small else SHAPES).items()))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = loaded_model(random_model(shape, device, dtype), name)
    results: dict[str, Any] = {"unit": f"{name}; ms a step, and times the step without drafts"}
    for batch in (1, 2) if small else (1, 8, 64):
        plain = 0.0
        for drafts in (0, 1, 3) if small else (0, 1, 3, 7, 15):
            if results.keys() - {"unit"} and device.type == "cpu":  # where a runner packs its model's weights
                loaded = loaded_model(random_model(shape, device, dtype), name)
            step = DecodeStep(loaded, batch, 40 if small else 2048, 0, drafts)
            milliseconds = timed(step.run, device, rounds)
            plain = plain or milliseconds
            graphs = step.runner.graphs
            results[f"{batch} x {1 + drafts} rows"] = {
                "step ms": milliseconds,
                "over plain": milliseconds / plain,
                "replays": 0 if graphs is None else graphs.replayed,
            }
            del step, graphs
    return results


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.empty(2 << 30 if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source), device, 5) / 1e3)


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


def decode_steps(device: torch.device, small: bool, rounds: int) -> dict[str, Any]:
    """Per model and load: step time, roofline, their ratio, and replays of CUDA graphs (0 on a CPU)."""
    speed = copy_speed(device)
    loads = [(2, 40, 0)] if small else [(1, 2048, 0), (64, 2048, 0), (64, 8192, 6144)]
    results: dict[str, Any] = {"copy speed, TB/s": speed / 1e12}
    for name, shape in (TOY_SHAPES if small else SHAPES).items():
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        loaded = loaded_model(random_model(shape, device, dtype), name)
        for batch, context, shared in loads:
            step = DecodeStep(loaded, batch, context, shared)
            milliseconds = timed(step.run, device, rounds)
            roofline = step.bytes_read / speed * 1e3
            graphs = step.runner.graphs
            results[f"{name} {batch} x {context}{f' ({shared} shared)' if shared else ''}"] = {
                "step ms": milliseconds,
                "roofline ms": roofline,
                "over": milliseconds / roofline,
                "tokens/s": batch / milliseconds * 1e3,
                "replays": 0 if graphs is None else graphs.replayed,
            }
            del step, graphs
            if device.type == "cuda":
                torch.cuda.empty_cache()
        del loaded
    return results
