# SPDX-License-Identifier: Apache-2.0
"""The host's part of a warm turn of a long conversation, stage by stage, in CPU milliseconds: parsing and
checking the body, rendering, looking up and tokenising what is new, checking the ids; with kept segments and
without.

    python -m benchmarks.warm_turn                     # 112,000 tokens, 74 of them new; half a minute
    python -m benchmarks.warm_turn --tokens 600000     # 3 MB
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.agents_served import model_folder
from benchmarks.figures import write_figures
from radixkv.cli.bench.server_process import words
from radixkv.engine.input_processor import PromptLimits
from radixkv.text.tokenizer import Tokenizer
from radixkv_server.apis.openai.schemas import ChatCompletionRequest
from radixkv_server.http.body import Ignored, parse_json

TURN_WORDS = 400
NEW_WORDS = 50


def conversation(tokenizer: Tokenizer, tokens: int) -> list[dict[str, str]]:
    """Return messages of so many tokens."""
    source, messages = random.Random(1), [{"role": "system", "content": words(random.Random(0), 2000)}]
    each = len(tokenizer.encode(words(source, TURN_WORDS), add_special_tokens=False))
    while len(messages) * each < tokens:
        role = "assistant" if len(messages) % 2 == 0 else "user"
        messages.append({"role": role, "content": words(source, TURN_WORDS)})
    return messages


def stages(
    make: Callable[[], Tokenizer],
    tokenizer: Tokenizer,
    make_turn: Callable[[], list[dict[str, str]]],
    *,
    warm: bool,
    rounds: int,
) -> dict[str, float]:
    """Return each stage's CPU milliseconds of turns that each add a message.

    Args:
        warm: the turns before are known; else each turn is the first of a tokenizer without segments.
    """
    limits = PromptLimits(1 << 30, 1 << 30, 16, tokenizer.vocab_size)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        messages = make_turn()
        body = json.dumps({"model": "m", "messages": messages}).encode()
        used = tokenizer if warm else make()
        if not warm:
            used.apply_chat_template([{"role": "user", "content": "x"}])  # what is made once
        marks = [("", time.process_time_ns())]

        def mark(name: str, marks: list[tuple[str, int]] = marks) -> None:
            marks.append((name, time.process_time_ns()))

        parsed = parse_json(body, 100)
        mark("JSON")
        ChatCompletionRequest.model_validate(parsed, context=Ignored(True, "placeholder"))
        mark("validation")
        _, encode = used.prepare_chat(messages)
        mark("template and lookup")
        ids = encode()
        mark("tokenising")
        limits.encode(ids)
        mark("limits")
        for (_, before), (name, after) in pairwise(marks):
            found.setdefault(name, []).append((after - before) / 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def turns_per_s(
    make: Callable[[], Tokenizer],
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    agents: int,
    *,
    warm: bool,
) -> float:
    """Return turns a second of so many agents at once, each in a thread."""
    turns = 4 if warm else 1
    used = [tokenizer if warm else make() for _ in range(agents)]
    if warm:
        tokenizer.apply_chat_template(messages)

    def work(number: int) -> None:
        own = list(messages)
        for turn in range(turns):
            own.append({"role": "user", "content": words(random.Random(1000 * number + turn), NEW_WORDS)})
            used[number].prepare_chat(own)[1]()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(agents)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return agents * turns / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=112_000)
    parser.add_argument("--agents", type=int, default=8, help="at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the command line sets it; all work is in this process
    with tempfile.TemporaryDirectory() as folder:
        hf_tokenizer = AutoTokenizer.from_pretrained(model_folder(Path(folder)))

    def make() -> Tokenizer:
        return Tokenizer(hf_tokenizer)

    tokenizer = make()
    messages = conversation(tokenizer, arguments.tokens)
    source = random.Random(5)

    def make_turn() -> list[dict[str, str]]:
        messages.append({"role": "user", "content": words(source, NEW_WORDS)})
        return list(messages)

    num_tokens = len(tokenizer.apply_chat_template(messages))
    parts = {
        name: stages(make, tokenizer, make_turn, warm=warm, rounds=arguments.rounds)
        for name, warm in (("warm", True), ("whole", False))
    }
    rates = {
        name: turns_per_s(make, tokenizer, list(messages), arguments.agents, warm=warm)
        for name, warm in (("warm", True), ("whole", False))
    }
    table = Table(title=f"A turn of {num_tokens} tokens, CPU ms")
    for column in ("", *parts["warm"], "sum", f"turns/s of {arguments.agents} at once"):
        table.add_column(column)
    for name, row in parts.items():
        shown = [f"{ms:.2f}" for ms in (*row.values(), sum(row.values()))]
        table.add_row(name, *shown, f"{rates[name]:.1f}")
    console = Console(width=140)
    console.print(table)
    ratio = sum(parts["warm"].values()) / sum(parts["whole"].values())
    console.print(f"warm / whole: CPU {ratio:.3f}, turns/s {rates['warm'] / rates['whole']:.1f}")
    figures = {"tokens": num_tokens, "cpu_ms": parts, "turns_per_s": rates, "cpu_ratio": ratio}
    write_figures(arguments.json, "warm_turn", figures)


if __name__ == "__main__":
    main()
