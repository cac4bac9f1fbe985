# SPDX-License-Identifier: Apache-2.0
"""How much of the KV memory does the running engine waste, and does the simulation say the same?

    python -m benchmarks.fragmentation [WORKLOAD...] [--scale 8] [--requests 96] [--model NAME] [--json FILE]

Serves sequences of recorded or drawn lengths with the real engine (model, scheduler, prefix cache), all
queued at once, and looks at the pool after every step for which somebody waits:

    waste        share of the slots in held blocks without a token (blocks held for whatever reason)
    uncomputed   share of those slots whose token is known, but not computed yet (chunked prefill)
    sequences    how many run at once

Beside it stand the figures of `radixkv simulate` for the same sequences and the same number of slots, with
and without shared prefixes. The end, when the queue is empty and the pool no longer full, counts on neither
side.
(The engine may hold more sequences than the simulation: it lets short ones pass a long one without room.)

WORKLOAD is a trace, or one of the length distributions of `radixkv simulate`. Default: the conversation trace
if the folder that RADIXKV_TRACES names has it, and `sharegpt`. The lengths (and blocks) of traces are
divided by --scale, so that a CPU gets through; shorter sequences waste more, so this is the harder case. The
default model is a random Llama with one layer; what it says does not matter here.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.figures import write_figures
from benchmarks.pool_usage import PoolUsage, measure_pool
from benchmarks.token_prompts import scaled as scaled_trace
from benchmarks.token_prompts import token_prompts
from benchmarks.traces import traces_folder
from radixkv.cli.replay.simulate import simulate
from radixkv.cli.replay.workload import DISTRIBUTIONS, Workload, from_distribution, from_file
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine
from radixkv.sampling.sampling_params import SamplingParams

TARGET = 0.04
VOCABULARY = 320
CONVERSATION = "mooncake_conversation.jsonl.gz"


def save_small_model(folder: Path, longest: int) -> None:
    """A random one-layer Llama with a byte tokenizer."""
    torch.manual_seed(0)
    disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def load_workload(name: str, requests: int, scale: int) -> Workload:
    """The first requests of a trace, or so many of a distribution; those of a trace `scale` times shorter."""
    if name in DISTRIBUTIONS and not Path(name).exists():
        return from_distribution(name, num_sequences=requests)
    return scaled(from_file(Path(name)), requests, scale)


def scaled(load: Workload, requests: int, scale: int) -> Workload:
    """The first requests with all lengths divided, and shared as before. Length 1 at least.

    Raises:
        SystemExit: the trace's blocks can't be divided.
    """
    inputs = np.maximum(load.input_lengths[:requests] // scale, 1)
    outputs = np.maximum(load.output_lengths[:requests] // scale, 1)
    name = Path(load.name).name + (f" / {scale}" if scale > 1 else "")
    if load.trace is None:
        return Workload(name, inputs, outputs)
    size = load.trace.block_size // scale
    if size * scale != load.trace.block_size:
        raise SystemExit(
            f"--scale {scale} does not divide the trace's blocks of {load.trace.block_size} tokens"
        )
    return Workload(name, inputs, outputs, scaled_trace(load.trace.first(requests), size))


def prompts(load: Workload, vocabulary: int) -> list[np.ndarray]:
    """Token ids: equal where the trace's blocks are, random elsewhere."""
    if load.trace is not None:
        return list(token_prompts(load.trace, range(vocabulary)))
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, length) for length in load.input_lengths.tolist()]


def look(engine: Engine) -> tuple[PoolUsage, int]:
    """The pool at this moment, and how many tokens with a slot have not been computed yet."""
    size = engine.cache.block_size
    leases = []
    uncomputed = 0
    for group in engine.requests:
        for sample in group.samples:
            if sample.lease is not None:
                # the lease may hear of decoded tokens later, and the newest one may have no slot yet
                table = sample.lease.block_table
                leases.append((min(sample.num_tokens, len(table) * size), table))
                uncomputed += max(sample.num_tokens - 1 - sample.num_computed, 0)
    return measure_pool(leases, size, engine.cache.stats.held_blocks), uncomputed


def measure(load: Workload, engine: Engine) -> dict[str, Any]:
    """Serve a workload; averages over the steps for which somebody waits, weighted as the simulation does."""
    assert engine.limits.vocab_size is not None
    for tokens, count in zip(
        prompts(load, min(engine.limits.vocab_size, 256)), load.output_lengths, strict=True
    ):
        engine.add_request(
            tokens.tolist(), SamplingParams(max_tokens=int(count), temperature=0.0, ignore_eos=True)
        )
    used = allocated = uncomputed = sequences = steps = peak = 0
    start = time.perf_counter()
    finished = 0
    while engine.has_work:
        finished += len(engine.step().finished)
        if not engine.scheduler.num_waiting:
            continue
        usage, pending = look(engine)
        steps += 1
        used += usage.used_slots
        allocated += usage.allocated_slots
        uncomputed += pending
        sequences += usage.sequences
        peak = max(peak, usage.sequences)
    engine.check()
    if finished != len(load):
        raise SystemExit(f"only {finished} of {len(load)} sequences were served")
    return {
        "waste": 1 - used / allocated if allocated else 0.0,
        "uncomputed": uncomputed / allocated if allocated else 0.0,
        "mean_sequences": sequences / max(steps, 1),
        "peak_sequences": peak,
        "steps": steps,
        "seconds": time.perf_counter() - start,
    }


def compare(load: Workload, *, model: str, at_once: float, block_size: int) -> dict[str, Any]:
    """One workload in the engine and in the simulation, with memory for about `at_once` mean sequences."""
    longest = int(load.final_lengths.max())
    blocks = -(-max(int(at_once * load.final_lengths.mean()), longest + 2 * block_size) // block_size)
    with tempfile.TemporaryDirectory() as folder:
        if not model:
            save_small_model(Path(folder), longest + 1)
        config = EngineConfig(
            model=model or folder,
            dtype="float32",
            device="cpu",
            block_size=block_size,
            num_blocks=blocks,
            max_model_len=longest + 1,
            max_num_batched_tokens=8192,
            max_num_seqs=len(load),
            max_queue=len(load) + 1,
            scheduling_policy="fcfs",
            threads=1,
        )
        engine = measure(load, build_engine(config))
    result: dict[str, Any] = {
        "workload": load.name,
        "sequences": len(load),
        "mean_length": float(load.final_lengths.mean()),
        "block_size": block_size,
        "total_slots": blocks * block_size,
        "engine": engine,
    }
    for scheme in ("paged", "paged+sharing"):
        simulated = simulate(load, scheme, blocks * block_size, block_size)
        result[scheme] = {
            "waste": simulated.waste,
            "mean_sequences": simulated.mean_sequences,
            "peak_sequences": simulated.peak_sequences,
        }
    return result


def print_results(results: list[dict[str, Any]]) -> None:
    """One line per workload and source of the figures."""
    table = Table(title="Waste of the paged pool, running engine beside simulation", title_justify="left")
    for column in ("workload", "mean tokens", "slots", "", "waste", "uncomputed", "sequences", "peak"):
        table.add_column(column, justify="left" if column in ("workload", "") else "right")
    for result in results:
        for source in ("engine", "paged", "paged+sharing"):
            figures = result[source]
            table.add_row(
                *(
                    (result["workload"], f"{result['mean_length']:.0f}", f"{result['total_slots']:,}")
                    if source == "engine"
                    else ("", "", "")
                ),
                "engine" if source == "engine" else f"simulated {source}",
                f"{figures['waste']:.2%}",
                f"{figures['uncomputed']:.1%}" if "uncomputed" in figures else "",
                f"{figures['mean_sequences']:.1f}",
                f"{figures['peak_sequences']}",
            )
    Console(width=None if Console().is_terminal else 140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", nargs="*", help="traces, or " + ", ".join(DISTRIBUTIONS))
    parser.add_argument("--scale", type=int, default=8, help="divide the lengths of traces by this")
    parser.add_argument("--requests", type=int, default=96, help="sequences of each workload")
    parser.add_argument("--at-once", type=float, default=12, help="memory, in sequences of mean length")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--model", default="", help="a model's name or folder instead of a random one")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    names = args.workload
    if not names:
        trace = traces_folder() / CONVERSATION
        names = ["sharegpt"]
        if trace.exists():
            names.insert(0, str(trace))
        else:
            print(f"{trace} is not there: only drawn lengths (set RADIXKV_TRACES)")
    results = []
    for name in names:
        load = load_workload(name, args.requests, args.scale)
        results.append(compare(load, model=args.model, at_once=args.at_once, block_size=args.block_size))
    print_results(results)
    worst = max(result["engine"]["waste"] for result in results)
    print(f"largest waste in the engine: {worst:.2%} (target with blocks of 16 tokens: under {TARGET:.0%})")
    write_figures(args.json, "fragmentation", {"results": results})


if __name__ == "__main__":
    main()
