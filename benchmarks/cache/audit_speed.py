# SPDX-License-Identifier: Apache-2.0
"""How fast `radixkv audit` reads logs of many kinds, on one core.

Each log is made anew from the same seed and audited by the command as users run it, with `--json`; what is
told is the log's bytes (unpacked) for each second of CPU time, that of an audit of one line left out, and the
most memory that was resident. CPU time is nearly the same on a machine that does other things as well.

    python -m benchmarks.audit_speed --megabytes 24 --json out.json
    python -m benchmarks.audit_speed --kinds rewritten,har --tokenizer smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import write_figures

Json = dict[str, Any]
_START = 1_790_000_000.0
_MARK = {"cache_control": {"type": "ephemeral"}}


class Writer:
    """Texts of made-up words, the same ones for the same seed."""

    def __init__(self, seed: int, letters: str = "abcdefghijklmnoprstuvw") -> None:
        self.rng = random.Random(seed)
        self._words = ["".join(self.rng.choices(letters, k=self.rng.randint(2, 9))) for _ in range(5000)]

    def text(self, chars: int) -> str:
        """About so many characters, with a line feed here and there."""
        words = self.rng.choices(self._words, k=chars // 6)
        return "".join(word + ("\n" if at % 19 == 18 else " ") for at, word in enumerate(words))

    def tools(self, count: int) -> list[Json]:
        """Tools as agents have them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": f"tool_{number}",
                    "description": self.text(300),
                    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
                },
            }
            for number in range(count)
        ]


def _usage(request: Json) -> Json:
    tokens = len(json.dumps(request)) // 4
    cached = {"cached_tokens": tokens * 3 // 4}
    return {"prompt_tokens": tokens, "completion_tokens": 60, "prompt_tokens_details": cached}


def _chat_line(request: Json, said: str, time_s: float) -> Json:
    message = {"role": "assistant", "content": said}
    answer = {"id": "c", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
    return _line("/v1/chat/completions", request, {**answer, "usage": _usage(request)}, time_s)


def _line(path: str, request: Json, response: Any, time_s: float) -> Json:
    return {"time": time_s, "seconds": 1.5, "path": path, "request": request, "response": response}


def agents(writer: Writer, *, stamped: bool = False) -> Iterator[Json]:
    """Agents with 20 tools that go on for 40 turns, four at a time.

    Args:
        stamped: the system prompt begins with the time of day.
    """
    system, tools, at = writer.text(8000), writer.tools(20), _START
    while True:
        threads: list[list[Json]] = [[{"role": "user", "content": writer.text(400)}] for _ in range(4)]
        for _ in range(40):
            for messages in threads:
                at += 3.0
                head = f"It is {time.strftime('%H:%M:%S', time.gmtime(at))}. {system}" if stamped else system
                sent = [{"role": "system", "content": head}, *messages]
                said = writer.text(300)
                yield _chat_line({"model": "gpt-x", "messages": sent, "tools": tools}, said, at)
                call = {"type": "function", "function": {"name": "tool_1", "arguments": '{"path": "a.py"}'}}
                messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": "1", "content": writer.text(700)})


def stamped(writer: Writer) -> Iterator[Json]:
    """As `agents`, with the time of day at the head of the system prompt."""
    return agents(writer, stamped=True)


def small(writer: Writer) -> Iterator[Json]:
    """Many small requests, each another one, under one short system prompt."""
    system, at = writer.text(600), _START
    while True:
        at += 0.1
        messages = [{"role": "system", "content": system}, {"role": "user", "content": writer.text(500)}]
        yield _chat_line({"model": "gpt-x", "messages": messages}, writer.text(100), at)


def rewritten(writer: Writer) -> Iterator[Json]:
    """Prompts of 350 kB, of which every 97th word is another one each time."""
    words, at = writer.text(350_000).split(" "), _START
    while True:
        at += 5.0
        words[97::97] = [f"w{writer.rng.randrange(10**6)}" for _ in words[97::97]]
        messages = [
            {"role": "system", "content": " ".join(words)},
            {"role": "user", "content": writer.text(200)},
        ]
        yield _chat_line({"model": "gpt-x", "messages": messages}, "Yes.", at)


def shuffled(writer: Writer) -> Iterator[Json]:
    """Prompts of 200 kB, of paragraphs retrieved in another order each time."""
    paragraphs, at = [writer.text(2000) for _ in range(100)], _START
    system = writer.text(3000)
    while True:
        at += 5.0
        writer.rng.shuffle(paragraphs)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": "\n\n".join(paragraphs)},
        ]
        yield _chat_line({"model": "gpt-x", "messages": messages}, "Yes.", at)


def huge(writer: Writer) -> Iterator[Json]:
    """One prompt of 3 MB that grows, its middle edited every third time."""
    text, at = writer.text(3_000_000), _START
    for number in range(10**9):
        at += 30.0
        text += writer.text(3000)
        if number % 3 == 2:
            middle = len(text) // 2
            text = text[:middle] + writer.text(200) + text[middle + 150 :]
        yield _chat_line({"model": "gpt-x", "messages": [{"role": "user", "content": text}]}, "Yes.", at)


def cyrillic(writer: Writer) -> Iterator[Json]:
    """As `agents`, in another alphabet, each letter written as an escape of six bytes."""
    return agents(Writer(writer.rng.randrange(99), "абвгдежзиклмнопрст"))


def breakpoints(writer: Writer) -> Iterator[Json]:
    """Anthropic's API: messages of many blocks, four breakpoints, tools' results."""
    system, at = writer.text(9000), _START
    tools = [
        {"name": f"tool_{n}", "description": writer.text(300), "input_schema": {"type": "object"}}
        for n in range(20)
    ]
    tools[-1].update(_MARK)
    while True:
        messages: list[Json] = [{"role": "user", "content": [{"type": "text", "text": writer.text(300)}]}]
        for turn in range(60):
            at += 4.0
            sent = [*messages[:-1], _marked(messages[-1])]
            if len(messages) > 2:
                sent[-3] = _marked(messages[-3])
            request = {
                "model": "claude-x",
                "max_tokens": 900,
                "tools": tools,
                "system": [{"type": "text", "text": system, **_MARK}],
                "messages": sent,
            }
            tokens = len(json.dumps(request)) // 4
            usage = {"input_tokens": 400, "cache_read_input_tokens": tokens, "cache_creation_input_tokens": 0}
            calls: list[Json] = [{"type": "text", "text": writer.text(100)}]
            results: list[Json] = []
            for number in range(4):
                name = f"call_{turn}_{number}"
                calls.append({"type": "tool_use", "id": name, "name": "tool_1", "input": {"path": name}})
                results.append({"type": "tool_result", "tool_use_id": name, "content": writer.text(200)})
            answer = {"id": "m", "type": "message", "content": calls, "usage": {**usage, "output_tokens": 90}}
            yield _line("/v1/messages", request, answer, at)
            messages += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]


def _marked(message: Json) -> Json:
    *rest, last = message["content"]
    return {**message, "content": [*rest, {**last, **_MARK}]}


def items(writer: Writer) -> Iterator[Json]:
    """The Responses API: all earlier items are sent again."""
    return _responses(writer, stored=False)


def stored_items(writer: Writer) -> Iterator[Json]:
    """The Responses API: each request names the answer that it goes on after, so that prompts are longer."""
    return _responses(writer, stored=True)


def _responses(writer: Writer, *, stored: bool) -> Iterator[Json]:
    system, at, number = writer.text(8000), _START, 0
    while True:
        sent: list[Json] = []
        before: Json = {}
        for turn in range(40):
            at, number = at + 2.0, number + 1
            new: list[Json] = [
                {"role": "user", "content": [{"type": "input_text", "text": writer.text(500)}]}
            ]
            if turn:
                new.insert(
                    0, {"type": "function_call_output", "call_id": f"c{turn - 1}", "output": writer.text(800)}
                )
            sent += new
            request = {"model": "gpt-x", "instructions": system, "input": new if stored else list(sent)}
            output: list[Json] = [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": writer.text(200)}],
                },
                {"type": "function_call", "call_id": f"c{turn}", "name": "tool_1", "arguments": '{"a": 1}'},
            ]
            tokens = len(json.dumps(sent)) // 4
            usage = {
                "input_tokens": tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 50,
            }
            answer = {"id": f"r{number}", "object": "response", "output": output, "usage": usage}
            yield _line("/v1/responses", {**request, **before}, answer, at)
            sent += output
            before = {"previous_response_id": f"r{number}"} if stored else {}


def streams(writer: Writer) -> Iterator[Json]:
    """As `agents`, with answers as the events of their streams."""
    for line in agents(writer):
        said = line["response"]["choices"][0]["message"]["content"]
        deltas = [{"choices": [{"index": 0, "delta": {"content": word + " "}}]} for word in said.split()]
        events = [*deltas, {"choices": [], "usage": line["response"]["usage"]}]
        text = "".join(f"data: {json.dumps({'id': 'c', **event})}\n\n" for event in events)
        yield {**line, "response": text + "data: [DONE]\n\n"}


def token_ids(writer: Writer) -> Iterator[Json]:
    """Completions whose prompts are lists of token ids that grow."""
    at = _START
    while True:
        prompt = [writer.rng.randrange(40_000) for _ in range(4000)]
        for _ in range(30):
            at += 1.0
            prompt = prompt + [writer.rng.randrange(40_000) for _ in range(300)]
            answer = {"object": "text_completion", "choices": [{"text": "Yes."}]}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 2}
            yield _line("/v1/completions", {"model": "m", "prompt": prompt}, {**answer, "usage": usage}, at)


def har(writer: Writer) -> Iterator[Json]:
    """As `agents`, as the entries of a HAR file."""
    for line in agents(writer):
        yield {
            "startedDateTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(line["time"])),
            "time": 1500.0,
            "request": {
                "method": "POST",
                "url": "https://api.example.com/v1/chat/completions",
                "headers": [{"name": "authorization", "value": "Bearer x"}],
                "postData": {"mimeType": "application/json", "text": json.dumps(line["request"])},
            },
            "response": {
                "status": 200,
                "headers": [],
                "content": {"mimeType": "application/json", "text": json.dumps(line["response"])},
            },
            "timings": {"wait": 700},
        }


def gzipped(writer: Writer) -> Iterator[Json]:
    """As `agents`, in a file packed by gzip; bytes are those unpacked."""
    return agents(writer)


KINDS: dict[str, tuple[Callable[[Writer], Iterator[Json]], str]] = {
    "agents": (agents, "openai"),
    "stamped": (stamped, "openai"),
    "small": (small, "vllm"),
    "rewritten": (rewritten, "radixkv"),
    "shuffled": (shuffled, "vllm"),
    "huge": (huge, "radixkv"),
    "cyrillic": (cyrillic, "vllm"),
    "breakpoints": (breakpoints, "anthropic"),
    "items": (items, "openai"),
    "stored_items": (stored_items, "radixkv"),
    "streams": (streams, "sglang"),
    "token_ids": (token_ids, "vllm"),
    "har": (har, "openai"),
    "gzipped": (gzipped, "openai"),
}


def write_log(kind: str, path: Path, num_bytes: int) -> None:
    """A log of that kind of about so many bytes."""
    size, separator = 0, ""
    with gzip.open(path, "wt", compresslevel=5) if kind == "gzipped" else path.open("w") as file:
        file.write('{"log": {"version": "1.2", "entries": [' if kind == "har" else "")
        for line in KINDS[kind][0](Writer(7)):
            text = separator + json.dumps(line)
            separator = ",\n" if kind == "har" else "\n"
            size += file.write(text)
            if size > num_bytes:
                break
        file.write("]}}\n" if kind == "har" else "\n")


def audit(log: Path, rules: str, tokenizer: str | None) -> tuple[float, float, Json]:
    """CPU seconds and resident megabytes of an audit as users run it, and its report."""
    report = log.with_suffix(".json")
    command = [sys.executable, "-m", "radixkv", "audit", str(log), "--rules", rules, "--json", str(report)]
    process = subprocess.Popen(
        [*command, *(["--tokenizer", tokenizer] if tokenizer else [])], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"audit_speed: the audit of {log.name} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3, json.loads(report.read_text())


def measure(kind: str, folder: Path, options: argparse.Namespace) -> Json:
    """The figures of one kind of log: medians over the rounds, the time of an audit of one line left out."""
    rules, log, line = KINDS[kind][1], folder / f"{kind}.log", folder / "line.log"
    write_log(kind, log, int(options.megabytes * 1e6))
    write_log("small", line, 0)
    seconds = []
    for _ in range(options.rounds):
        start = audit(line, rules, options.tokenizer)[0]
        used, resident, report = audit(log, rules, options.tokenizer)
        seconds.append(used - start)
    log.unlink()
    cpu, summary = statistics.median(seconds), report["summary"]
    return {
        "rules": rules,
        "megabytes": report["bytes"] / 1e6,
        "cpu_seconds": cpu,
        "megabytes_per_second": report["bytes"] / 1e6 / cpu,
        "requests": summary["requests"],
        "requests_per_second": summary["requests"] / cpu,
        "skipped_lines": summary["skipped_lines"],
        "rules_hit_rate": summary["rules_hit_rate"],
        "resident_megabytes": resident,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="which logs (default: all)")
    parser.add_argument("--megabytes", type=float, default=24.0, help="of each log, unpacked")
    parser.add_argument("--tokenizer", help="as of `radixkv audit`; default: none, tokens are estimated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures: dict[str, Json] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds.split(","):
            found = figures[kind] = measure(kind, Path(folder), options)
            print(
                f"{kind:13} {found['rules']:10} {found['megabytes_per_second']:6.1f} MB/s "
                f"{found['requests_per_second']:7,.0f} requests/s  {found['requests']:6,} requests "
                f"{found['resident_megabytes']:5.0f} MB resident",
                flush=True,
            )
    write_figures(options.json, "audit_speed", {"tokenizer": options.tokenizer, "logs": figures})


if __name__ == "__main__":
    main()
