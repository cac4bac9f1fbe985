# SPDX-License-Identifier: Apache-2.0
"""GGUF files kept as blocks beside llama.cpp on the same file: CPU time of a token, of 8, of a prompt.

llama.cpp is the server of the xllamacpp wheel, whose kernels are compiled for AVX2, or with `--llama-server`
one that was compiled for this processor: on one with AVX-512 the wheel is slower. It runs twice, with its
blocks as they are ("plain") and reordered ("repacked", its default). Each engine is a process with one thread
that takes turns with the same random prompts; the clock is CPU time of the whole process, with scheduling,
sampling and text, so that other programs disturb less. A token's time is the difference between answers of 1
and of 17 tokens.

    python -m benchmarks.gguf_llamacpp FILE.gguf ... [--rounds N] [--prompt N] [--json OUT]
    python -m benchmarks.gguf_llamacpp FILE.gguf --llama-server llama.cpp/build/bin/llama-server

A round of a billion weights takes about 20 s of CPU per engine with AVX2. `--prompt 128` saves a half.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.peers.llama_cpp import Build, find_build
from benchmarks.peers.process import RunningServer
from radixkv import LLM, SamplingParams
from radixkv.model.loading.model_cache import cache_home

SLOTS, MORE = 8, 16
RADIXKV = "radixkv"
#: Name -> options of llama.cpp's server.
LLAMA_CPP = {"llama.cpp plain": ["--no-repack"], "llama.cpp repacked": []}
SHORT = 16
_PATIENCE_S = 3600


class Engine(Protocol):
    """A process that takes turns."""

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """CPU seconds of one turn: all prompts at once, greedy, as many tokens of each whatever they are."""


class RadixKV:
    """radixkv in a process.

    Attributes:
        about: what it said at its start: CPU seconds of it, the model's vocabulary.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the engine ended: {self._process.args!r}")

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """See `Engine`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["cpu_s"])


class LlamaCpp:
    """llama.cpp's server, idle between the turns."""

    def __init__(self, server: RunningServer) -> None:
        self._process = psutil.Process(server.process.pid)
        self._client = httpx.Client(base_url=server.url, timeout=_PATIENCE_S, trust_env=False)

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """See `Engine`."""
        body = {
            "prompt": prompts, "n_predict": tokens, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False,
        }  # fmt: skip
        began = self._process.cpu_times()
        answers = self._client.post("/completion", json=body).raise_for_status().json()
        ended = self._process.cpu_times()
        each = answers if isinstance(answers, list) else [answers]
        assert [answer["tokens_predicted"] for answer in each] == [tokens] * len(prompts), answers
        return ended.user + ended.system - began.user - began.system


@contextlib.contextmanager
def radixkv_engine(file: str) -> Iterator[RadixKV]:
    """radixkv on a file, until the end of the block."""
    command = [sys.executable, "-m", "benchmarks.gguf_llamacpp", file, "--here"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield RadixKV(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # its measurements are done
            process.kill()


@contextlib.contextmanager
def llama_cpp_engine(build: Build, file: str, options: list[str]) -> Iterator[LlamaCpp]:
    """llama.cpp on a file, until the end of the block."""
    log = cache_home() / "peers" / "logs" / "gguf_llamacpp.log"
    started = build.start(Path(file), *options, slots=SLOTS, context=1024, threads=1, log=log, timeout=300)
    with started as server:
        yield LlamaCpp(server)


def turns_here(file: str) -> None:
    """Take turns as radixkv, until standard input ends."""
    llm = LLM(
        file, device="cpu", gguf="packed", num_blocks=1024, max_model_len=1024, max_num_batched_tokens=1024,
        speculation="off", threads=1,
    )  # fmt: skip
    runner: Any = llm.engine.runner
    vocabulary = runner.model.config.get_text_config().vocab_size
    print(json.dumps({"start_s": time.process_time(), "vocabulary": vocabulary}), flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        began = time.process_time()
        params = SamplingParams(temperature=0, max_tokens=turn["tokens"], ignore_eos=True)
        llm.generate(turn["prompts"], params)
        print(json.dumps({"cpu_s": time.process_time() - began}), flush=True)


def measure(
    engines: dict[str, Engine], vocabulary: int, rounds: int, length: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of each step and engine: medians over the rounds.

    Args:
        vocabulary: tokens of the model.
        length: of the long prompt.
    """
    prompts = Prompts(vocabulary)
    found: dict[str, dict[str, list[float]]] = {}
    for engine in engines.values():  # what is made at the first call
        engine.seconds(prompts.draw(SLOTS, 4), 2)
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        for name, engine in engines.items():
            one, eight = prompts.draw(1, SHORT), prompts.draw(SLOTS, SHORT)
            long = prompts.draw(1, length)
            times = {
                "decode, 1 sequence": _token(engine, one),
                "decode, 8 sequences": _token(engine, eight),
                f"prompt of {length}": 1000 * engine.seconds(long, 1),
            }
            for step, time_ms in times.items():
                found.setdefault(step, {}).setdefault(name, []).append(time_ms)
    return {
        step: {name: statistics.median(times) for name, times in own.items()} for step, own in found.items()
    }


class Prompts:
    """Random prompts of ordinary tokens.

    Args:
        vocabulary: tokens of the model, the first tenth of which is left to control tokens.
    """

    def __init__(self, vocabulary: int) -> None:
        self._chance, self._vocabulary = random.Random(1), vocabulary

    def draw(self, count: int, length: int) -> list[list[int]]:
        """Draw prompts of a length."""
        first, last = self._vocabulary // 10, self._vocabulary - 1
        return [[self._chance.randrange(first, last) for _ in range(length)] for _ in range(count)]


def _token(engine: Engine, prompts: list[list[int]]) -> float:
    """Milliseconds of a step for one more token of each prompt."""
    fewer = engine.seconds(prompts, 1)
    # Another first token: nothing of the prompt is in a prefix cache.
    changed = [[prompt[0] + 1, *prompt[1:]] for prompt in prompts]
    return 1000 * (engine.seconds(changed, 1 + MORE) - fewer) / MORE


def main() -> None:
    # Ended from outside, it still ends the servers that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--llama-server",
        type=Path,
        metavar="PROGRAM",
        help="measure the llama.cpp of this program, compiled for this processor, in place of the wheel",
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns (default 2)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt (default 512)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        turns_here(args.files[0])
        return
    build = find_build(args.llama_server, install_timeout=600)
    results: list[dict[str, Any]] = []
    for file in args.files:
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(radixkv_engine(file))
            engines: dict[str, Engine] = {RADIXKV: own}
            for name, options in LLAMA_CPP.items():
                engines[name] = stack.enter_context(llama_cpp_engine(build, file, options))
            steps = measure(engines, int(own.about["vocabulary"]), args.rounds, args.prompt)
        results.append({"file": Path(file).name, "start_s": own.about["start_s"], "steps": steps})
        table = Table("ms of CPU", *engines, "of the better llama.cpp", title=Path(file).name)
        for step, times in steps.items():
            better = min(times[name] for name in LLAMA_CPP)
            cells = [f"{times[name]:.1f}" for name in engines]
            table.add_row(step, *cells, f"{times[RADIXKV] / better:.2f}")
        Console(width=100).print(table)
    print(f"llama.cpp: {build.versions}")
    write_figures(args.json, "gguf_llamacpp", {"versions": build.versions, "results": results})


if __name__ == "__main__":
    main()
