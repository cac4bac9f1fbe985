# SPDX-License-Identifier: Apache-2.0
"""Float32, bfloat16 and int8 weights on this CPU, at each instruction set that it has.

One process for each instruction set (`RADIXKV_CPU_ISA`; torch's libraries are limited likewise) has a model
three times and runs the same steps with each in turns: decodes of 1 and 8 sequences, prompts of 512 and 1,500
tokens. Medians of the steps' times, and of their ratios to float32's of the same turn. One thread, and the
clock is its CPU time, so that other programs disturb little.

    python -m benchmarks.cpu_products [--model embedded|0.3b] [--isa avx2 ...] [--rounds N]
    python -m benchmarks.cpu_products --json benchmarks/results/cpu_products.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.figures import write_figures
from radixkv import LLM
from radixkv.model.loading.embedded_model import EMBEDDED_MODELS, prepare_embedded
from radixkv.scheduling.batch import Batch
from radixkv_kernels.cpu.isa import levels

#: Name -> (sequences, new tokens of each, tokens before them).
STEPS = {
    "decode, 1 sequence": (1, 1, 128),
    "decode, 8 sequences": (8, 1, 128),
    "prompt of 512": (1, 512, 0),
    "prompt of 1,500": (1, 1500, 0),
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
#: What limits torch's own operators and its libraries to the instructions of a level.
LIBRARIES = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "vnni": {},
}
BLOCK = 16


def random_model(folder: Path) -> Path:
    """A random Llama of 0.3 billion weights in bfloat16, with the embedded model's tokenizer."""
    for file in prepare_embedded(EMBEDDED_MODELS[0]).glob("*"):
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22}
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 49152}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=4096, tie_word_embeddings=True)
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(previous)
    return folder


def make_batch(sequences: int, tokens: int, before: int, vocabulary: int = 4000) -> Any:
    """A step: `tokens` new tokens for each of the sequences, each in blocks of its own."""
    blocks = -(-(before + tokens) // BLOCK)
    positions = np.tile(np.arange(before, before + tokens, dtype=np.int64), sequences)
    slots = np.concatenate(
        [np.arange(before, before + tokens, dtype=np.int64) + s * blocks * BLOCK for s in range(sequences)]
    )
    return Batch(
        entries=[],
        token_ids=np.random.default_rng(0).integers(5, vocabulary, sequences * tokens),
        positions=positions,
        query_starts=np.arange(0, sequences * tokens + 1, tokens, dtype=np.int32),
        context_lengths=np.full(sequences, before + tokens, dtype=np.int32),
        block_tables=[np.arange(blocks, dtype=np.int32) + s * blocks for s in range(sequences)],
        write_slots=slots,
        write_rows=None,
        logit_rows=np.arange(tokens - 1, sequences * tokens, tokens, dtype=np.int64),
        copy_groups=[],
    )


def measure(model: str, rounds: int) -> dict[str, Any]:
    """Steps of one model with each kind of weights, in turns, at the instruction set of this process."""
    runners = {
        name: LLM(
            model, device="cpu", num_blocks=128, block_size=BLOCK, max_model_len=2048,
            max_num_batched_tokens=2048, speculation="off", threads=1, **options,
        ).engine.runner
        for name, options in WEIGHTS.items()
    }  # fmt: skip
    figures: dict[str, Any] = {}
    for step, shape in STEPS.items():
        batch = make_batch(*shape)
        times: dict[str, list[float]] = {name: [] for name in runners}
        # A decode is repeated within a turn, and its first turn is not counted; prompts have fewer turns.
        repeats, first, turns = (4, 1, rounds + 1) if shape[1] == 1 else (1, 0, max(1, rounds // 3))
        for turn in range(turns):
            for name, runner in runners.items():
                start = time.thread_time()
                for _ in range(repeats):
                    runner.execute(batch)
                if turn >= first:
                    times[name].append((time.thread_time() - start) / repeats)
        ratios = {
            name: statistics.median(a / b for a, b in zip(own, times["float32"], strict=True))
            for name, own in times.items()
        }
        print(step, ratios, file=sys.stderr)
        figures[step] = {
            name: {"ms": 1000 * statistics.median(own), "of_float32": ratios[name]}
            for name, own in times.items()
        }
    return figures


def in_process(level: str, model: str, rounds: int) -> dict[str, Any]:
    """`measure` in a process that is limited to a level."""
    command = [sys.executable, "-m", "benchmarks.cpu_products", "--here", model, "--rounds", str(rounds)]
    environment = {**os.environ, **LIBRARIES[level], "RADIXKV_CPU_ISA": level}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=["embedded", "0.3b"], help="default: both")
    parser.add_argument("--isa", action="append", choices=list(LIBRARIES), help="default: all there are")
    parser.add_argument(
        "--rounds", type=int, default=9, help="turns of a decode, three times those of a prompt (default 9)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--here", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.here, args.rounds)))
        return
    console, results = Console(width=110), []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.model or ["embedded", "0.3b"]:
            where = model if model == "embedded" else str(random_model(Path(folder)))
            table = Table(title=f"Steps of the {model} model, ms (of float32)")
            for column in ("instructions", "step", *WEIGHTS):
                table.add_column(column, justify="right" if column in WEIGHTS else "left")
            for level in args.isa or levels():
                figures = in_process(level, where, args.rounds)
                results.append({"model": model, "isa": level, "steps": figures})
                for step, own in figures.items():
                    cells = (f"{one['ms']:.1f} ({one['of_float32']:.2f})" for one in own.values())
                    table.add_row(level, step, *cells)
            console.print(table)
    write_figures(args.json, "cpu_products", {"results": results})


if __name__ == "__main__":
    main()
