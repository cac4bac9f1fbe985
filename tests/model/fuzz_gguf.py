# SPDX-License-Identifier: Apache-2.0
"""Thousands of damaged GGUF files: each is an error in words or a model, soon, in little memory.

Each batch of files is loaded in a process of its own, with a limit on its memory. Ends with an error that
names the seed of the first file that broke a rule; `--seed N --cases 1` repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import gguf
import torch
from damaged_gguf import damaged
from gguf_files import write_llama_gguf
from gguf_hybrid_files import HYBRIDS, make_hybrid, write_hybrid
from tiny_models import byte_level_tokenizer

from radixkv.engine.config import EngineConfig
from radixkv.errors import RadixKVError
from radixkv.model.loading.loader import load_model

_BATCH = 100
_MAX_SECONDS, _MAX_BYTES = 1.0, 500 << 20


def main() -> None:
    """Load damaged files until there were enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first file")
    parser.add_argument("--gguf", choices=("auto", "float32"), default="auto", help="how weights are kept")
    parser.add_argument("--hybrid", choices=sorted(HYBRIDS), help="of these models, not of a Llama")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has none of the other threads
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.gguf"
        if options.hybrid is None:
            write_llama_gguf(whole, {"rest": "Q8_0"}, hidden=64, layers=1)
        else:
            model = make_hybrid(options.hybrid, vocab_size=len(byte_level_tokenizer()))
            write_hybrid(whole, options.hybrid, model, ("Q8_0",), with_tokenizer=True)
        _load(whole, options.gguf)  # what is imported and compiled once
        last = options.seed + options.cases
        for first in range(options.seed, last, _BATCH):
            child = os.fork()
            if child == 0:
                _run(whole, range(first, min(first + _BATCH, last)), options.gguf)
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"broken by a file of the seeds from {first}: status {status}")
            print(f"{min(first + _BATCH, last) - options.seed} files", flush=True)


def _run(whole: Path, seeds: range, kept: str) -> None:
    """Load the files of some seeds and end this process."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(120, exit=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MAX_BYTES, used + _MAX_BYTES))
    data = whole.read_bytes()
    end = int(gguf.GGUFReader(str(whole)).data_offset)
    path = whole.with_name(f"damaged-{seeds[0]}.gguf")
    for seed in seeds:
        path.write_bytes(damaged(data, end, random.Random(seed)))
        # A format met for the first time is compiled: the second load counts.
        if (
            _seconds(path, kept, seed) > _MAX_SECONDS
            and (time_s := _seconds(path, kept, seed)) > _MAX_SECONDS
        ):
            _end(seed, f"took {time_s:.1f} s")
    path.unlink()
    os._exit(0)


def _seconds(path: Path, kept: str, seed: int) -> float:
    """CPU seconds of a load, which may end in an error in words alone."""
    began = time.process_time()
    try:
        _load(path, kept)
    except RadixKVError as error:
        if "MemoryError" in str(error) or "allocate" in str(error):
            _end(seed, f"takes too much memory: {error}")
    except BaseException as error:
        _end(seed, f"{type(error).__name__}: {error}")
    return time.process_time() - began


def _load(path: Path, kept: str) -> None:
    load_model(EngineConfig(model=str(path), device="cpu", gguf=kept), show_progress=False)


def _end(seed: int, what: str) -> None:
    print(f"seed {seed}: {what}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
