# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints on a CPU, each beside a GGUF file of the same bits: time of steps, peak memory.

Models are random ones of one shape, written by this script: products of the layers in a format, embeddings
and the output product in bfloat16, in the GGUF files as well. Layers have the same numbers.

Steps of a format and of its GGUF file run in one process, in turns: decodes of 1 and 8 sequences and a prompt
of 512 tokens, medians of the turns. One thread, and the clock is CPU time, so that other programs disturb
less. Peak memory (`VmHWM`) is of a process of its own, with 576 tokens of K/V, that answers a prompt by the
`LLM` class, with kernels compiled before; with `--first-start`, it compiles them.

A line is printed, and FILE written, as soon as a format is measured. All take 15 minutes on two free cores.

    python -m benchmarks.stored_formats [FORMAT ...] [--rounds N] [--first-start] [--json FILE]
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.cpu_products import make_batch
from benchmarks.figures import write_figures
from radixkv import LLM
from tests.support import quantised_checkpoints as written
from tests.support.tiny_models import add_llama_tensors, byte_level_tokenizer, finish_gguf, llama_gguf_writer

#: As `llama_gguf_writer` has it: 4 heads, 2 of keys and values.
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 1024, 2816, 16, 4, 2, 49_152
#: Name -> (sequences, new tokens of each, tokens before them).
STEPS = {"decode, 1 sequence": (1, 1, 64), "decode, 8 sequences": (8, 1, 64), "prompt of 512": (1, 512, 0)}
#: What is allowed, of the GGUF file's time and beyond 1.15 times the folder's own size.
LIMIT, LIMIT_GB = 1.15, 0.7
GGUF_4, GGUF_8 = "GGUF Q4_0", "GGUF Q8_0"


@dataclass(frozen=True)
class Format:
    """A format that is measured.

    Attributes:
        write: stores a weight.
        beside: the GGUF file of the same bits.
        settings: its `quantization_config`.
    """

    write: written.Writer
    beside: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _groups(bits: int, size: int, **more: Any) -> dict[str, Any]:
    settings = written.groups("int", "group", num_bits=bits, group_size=size, **more)
    return {**settings, "format": "pack-quantized"}


_BITS_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_TORCHAO = {"quant_method": "torchao", "quant_type": {}}
_FLOATS = written.groups("float", "group", num_bits=4, group_size=16)
FORMATS: dict[str, Format] = {
    "AWQ, groups of 128": Format(
        partial(written.awq, size=128),
        GGUF_4,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    ),
    "GPTQ, activation order": Format(
        partial(written.gptq, size=128, shuffled=True),
        GGUF_4,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
    ),
    "compressed W4A16": Format(partial(written.pack_quantized, size=128), GGUF_4, _groups(4, 128)),
    "MXFP4": Format(written.mxfp4, GGUF_4, {**_FLOATS, "format": "mxfp4-pack-quantized"}),
    "NVFP4": Format(written.nvfp4, GGUF_4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "NF4": Format(written.nf4, GGUF_4, _BITS_4),
    "FP4": Format(written.fp4, GGUF_4, _BITS_4),
    "torchao int4": Format(partial(written.torchao, kind="Int4Tensor", size=128), GGUF_4, _TORCHAO),
    "MLX, 4 bits": Format(partial(written.mlx, group=64), GGUF_4, {"group_size": 64, "bits": 4}),
    "FP8 in blocks of 128": Format(
        partial(written.block_fp8, block=128),
        GGUF_8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "FP8 of channels": Format(written.channel_fp8, GGUF_8, written.groups("float", "channel")),
    "compressed W8A8": Format(written.int8, GGUF_8, written.groups("int", "channel")),
    "compressed W8A16": Format(partial(written.pack_quantized, bits=8, size=128), GGUF_8, _groups(8, 128)),
    "bitsandbytes int8": Format(
        written.bitsandbytes_int8, GGUF_8, {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
    "torchao int8": Format(partial(written.torchao, kind="Int8Tensor"), GGUF_8, _TORCHAO),
    "torchao FP8": Format(partial(written.torchao, kind="Float8Tensor"), GGUF_8, _TORCHAO),
}


def _shapes() -> dict[str, tuple[int, int]]:
    """Products of a layer, by transformers' names -> [out, in]."""
    head = HIDDEN // HEADS
    return {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }


def write_folder(folder: Path, form: Format) -> None:
    """A model whose layers are alike, in a format."""
    from transformers import LlamaConfig

    source = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    header = {"format": "pt"}
    for name, shape in _shapes().items():
        stored = form.write(torch.randn(shape, generator=source) / shape[1] ** 0.5)
        for layer in range(LAYERS):
            stem = f"model.layers.{layer}.{name}."
            tensors |= {
                stem + leaf: tensor.clone(memory_format=torch.contiguous_format)
                for leaf, tensor in stored.tensors.items()
            }
            header |= {stem + leaf: text for leaf, text in stored.header.items()}
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=source) / HIDDEN**0.5
    tensors["model.embed_tokens.weight"] = embedding.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata=header)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY, tie_word_embeddings=True, dtype="bfloat16",
        max_position_embeddings=2048,
    )  # fmt: skip
    own = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    described = {
        "quantization" if "quant_method" not in form.settings else "quantization_config": form.settings
    }
    (folder / "config.json").write_text(json.dumps(own | described))
    byte_level_tokenizer().save_pretrained(folder)


def write_gguf(path: Path, kind: str) -> None:
    """The same model in a format of GGUF, with other numbers; all layers are alike."""
    import gguf

    writer, vocab = llama_gguf_writer(
        path, hidden=HIDDEN, inner=INNER, layers=LAYERS, context=2048, vocab=VOCABULARY
    )
    made: dict[str, Any] = {}

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
            return
        own = gguf.GGMLQuantizationType["BF16" if name == "token_embd" else kind]
        part = name.rpartition(".")[2]
        if part not in made:
            numbers = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
            made[part] = gguf.quantize(numbers / np.float32(shape[1] ** 0.5), own)
        writer.add_tensor(f"{name}.weight", made[part], raw_dtype=own)

    add_llama_tensors(add, vocab=vocab, hidden=HIDDEN, inner=INNER, layers=LAYERS)
    finish_gguf(writer)


def size_gb(path: Path) -> float:
    """Of a file, or of a folder's weights."""
    return (path / "model.safetensors" if path.is_dir() else path).stat().st_size / 1e9


def open_runner(path: Path | str) -> Any:
    """The runner of an engine with a model's weights as they are stored."""
    return LLM(
        str(path), device="cpu", num_blocks=40, block_size=16, max_model_len=576,
        max_num_batched_tokens=1024, speculation="off", threads=1,
    ).engine.runner  # fmt: skip


#: Prints the most bytes of a process that loads a model and answers a prompt, as a user's program does.
_PEAK = """
import re, sys
from pathlib import Path
from radixkv import LLM, SamplingParams
llm = LLM(
    sys.argv[1], device="cpu", num_blocks=40, block_size=16, max_model_len=576, max_num_batched_tokens=1024,
    speculation="off", threads=1,
)
llm.generate([[3 + i % 250 for i in range(512)]], SamplingParams(max_tokens=4, ignore_eos=True))
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


def peak(path: Path, *, first_start: bool) -> float:
    """Peak gigabytes of a process of its own, see `_PEAK`: the first one, or one that finds all compiled."""
    with tempfile.TemporaryDirectory() as empty:
        more = {"NUMBA_CACHE_DIR": empty} if first_start else {}
        for _ in range(1 if first_start else 2):
            done = subprocess.run(
                [sys.executable, "-c", _PEAK, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, check=True, env=os.environ | more,
            )  # fmt: skip
    return int(done.stdout.splitlines()[-1]) / 1e9


def steps(runners: Mapping[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each step of each model, in turns."""
    figures: dict[str, dict[str, float]] = {name: {} for name in runners}
    for step, shape in STEPS.items():
        batch = make_batch(*shape)
        times: dict[str, list[float]] = {name: [] for name in runners}
        turns = rounds if shape[1] == 1 else max(1, rounds // 5)
        for turn in range(turns + 1):  # the first one is not counted
            for name, one in runners.items():
                began = time.thread_time()
                one.execute(batch)
                if turn:
                    times[name].append(1000 * (time.thread_time() - began))
        for name, own in times.items():
            figures[name][step] = statistics.median(own)
    return figures


def report(name: str, path: Path, peak_gb: float, ms: dict[str, float], other: dict[str, float]) -> Any:
    """Print a model's line; its figures."""
    size = size_gb(path)
    allowed = LIMIT * size + LIMIT_GB
    ratios = {step: ms[step] / other[step] for step in STEPS}
    shown = [f"{ms[step]:7.1f} {ratios[step]:5.2f}" for step in STEPS]
    print(f"{name:24}{1000 * peak_gb:8.0f} ({1000 * allowed:.0f}) ", *shown, sep="  ", flush=True)
    return {"gb": size, "peak_gb": peak_gb, "allowed_gb": allowed, "ms": ms, "of_gguf": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {'; '.join(FORMATS)}. All")
    parser.add_argument("--rounds", type=int, default=25, help="turns of a decode (default 25)")
    parser.add_argument("--first-start", action="store_true", help="peaks of processes that compile")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    args = parser.parse_args()
    unknown = set(args.formats) - set(FORMATS)
    if unknown:
        parser.error(f"unknown formats: {', '.join(sorted(unknown))}")
    results: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    print(f"{'':24}peak (allowed), MB", *(f"  {step}, ms, of GGUF" for step in STEPS), flush=True)
    with tempfile.TemporaryDirectory() as place:
        for name in args.formats or FORMATS:
            form = FORMATS[name]
            folder, other = Path(place) / "model", Path(place) / f"{form.beside}.gguf"
            is_new = form.beside not in beside
            if is_new:
                write_gguf(other, form.beside.rpartition(" ")[2])
                beside[form.beside] = open_runner(other)
            write_folder(folder, form)
            figures = steps({form.beside: beside[form.beside], name: open_runner(folder)}, args.rounds)
            models = {form.beside: other, name: folder} if is_new else {name: folder}
            for each, path in models.items():
                found = peak(path, first_start=args.first_start)
                results[each] = report(each, path, found, figures[each], figures[form.beside])
            write_figures(args.json, "stored_formats", {"results": results})
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
