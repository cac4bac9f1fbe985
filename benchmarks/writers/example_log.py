# SPDX-License-Identifier: Apache-2.0
"""Record the example log of `radixkv audit --example`: agents at work, four of which break their prompts.

    radixkv serve --port 8000 &
    python -m benchmarks.example_log [--url http://127.0.0.1:8000] [--output FILE]

Each agent works with a real server and sends what it answers back, as agents do. Nothing of the log is made
up but what the users and the tools say.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

OUTPUT = Path(__file__).resolve().parents[2] / "radixkv" / "observe" / "audit" / "example_log.jsonl.gz"
Json = dict[str, Any]

RULES = " ".join(
    f"{number}. {rule}"
    for number, rule in enumerate(
        (
            "Read a file before you change it.",
            "Change as little as the task needs, and nothing that was not asked for.",
            "Run the tests after every change, and say which of them fail.",
            "Never write secrets into code, logs or messages.",
            "Ask before you delete anything that you did not make yourself.",
            "Prefer the standard library; say why where another one is needed.",
            "Keep functions short, and name them after what they do.",
            "Write no comment that only repeats the code.",
            "When a command fails, read its output to the end before you try again.",
            "Say what you did in two sentences, without praise.",
            "If two ways are equally good, take the one that is easier to undo.",
            "Do not guess what a function does: look at it.",
        ),
        start=1,
    )
)
SYSTEM = f"You are a coding agent that works in a user's repository with the tools below. {RULES}"
TASKS = (
    "The importer drops the last line of a file that does not end with a line feed. Find out why.",
    "Now add a test for it that fails without the change.",
    "Does the exporter have the same fault? Look at it, too.",
    "Then put what both share into one function.",
    "Write the line for the changelog.",
)
RESULTS = (
    "def read_rows(path):\n    with open(path) as file:\n        text = file.read()\n"
    "    for line in text.split('\\n')[:-1]:\n        yield parse(line)\n",
    "3 passed in 0.12s\n",
    "def write_rows(path, rows):\n    with open(path, 'w') as file:\n"
    "        for row in rows:\n            file.write(format(row) + '\\n')\n",
    "5 passed in 0.14s\n",
)


def tool(name: str, description: str, **arguments: str) -> Json:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS = [
    tool("read_file", "Read a text file of the repository.", path="Its path from the repository's root."),
    tool("write_file", "Write a text file of the repository.", path="Its path.", text="What it shall hold."),
    tool("run_tests", "Run the tests in a folder, and give their output.", folder="The folder's path."),
    tool("search", "Find a text in all files of the repository.", text="What to look for, as it is written."),
]


@dataclass
class Agent:
    """One conversation; what is set here is what breaks it."""

    name: str
    system: Callable[[int], str] = lambda turn: SYSTEM
    tools: Callable[[int], list[Json]] = lambda turn: TOOLS
    rewrite: Callable[[int, list[Json]], list[Json]] = lambda turn, messages: messages
    messages: list[Json] = field(default_factory=list)

    def body(self, turn: int, model: str) -> Json:
        said: list[Json] = [{"type": "text", "text": TASKS[turn]}]
        if turn:
            said.insert(0, {"type": "text", "text": f"Output of the last command:\n{RESULTS[turn - 1]}"})
        self.messages.append({"role": "user", "content": said})
        self.messages = self.rewrite(turn, self.messages)
        return {
            "model": model,
            "max_tokens": 48,
            "temperature": 0.0,
            "metadata": {"user_id": f"user_example_session_{self.name}"},
            "system": [{"type": "text", "text": self.system(turn), "cache_control": {"type": "ephemeral"}}],
            "tools": self.tools(turn),
            "messages": _marked(self.messages),
        }


def _marked(messages: list[Json]) -> list[Json]:
    """The messages with a breakpoint at the end of the newest one."""
    *before, last = messages
    *parts, end = last["content"]
    return [*before, {**last, "content": [*parts, {**end, "cache_control": {"type": "ephemeral"}}]}]


def _compacted(turn: int, messages: list[Json]) -> list[Json]:
    if turn != 3:
        return messages
    summary = "Summary of the conversation so far: the importer's fault was found and has a test now."
    return [{"role": "user", "content": [{"type": "text", "text": summary}, *messages[-1]["content"]]}]


def agents() -> list[Agent]:
    """One that is steady, and one for each habit that breaks prompts."""
    return [
        Agent("steady-01"),
        Agent(
            "clock-0002",
            system=lambda turn: f"The time is {time.strftime('%Y-%m-%d %H:%M:%S')}. {SYSTEM}",
        ),
        Agent("tools-0003", tools=lambda turn: TOOLS if turn % 2 == 0 else TOOLS[::-1]),
        Agent(
            "folder-004",
            system=lambda turn: f"{SYSTEM} Your working directory is /tmp/run-{8200 + turn * 37}/importer.",
        ),
        Agent("compact-05", rewrite=_compacted),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    running, lines = agents(), []
    with httpx.Client(base_url=options.url, timeout=300) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for turn in range(len(TASKS)):
            for agent in running:
                body, began = agent.body(turn, model), time.time()
                answer = client.post("/v1/messages", json=body).raise_for_status().json()
                agent.messages.append({"role": "assistant", "content": answer["content"]})
                record = {"time": round(began, 3), "seconds": round(time.time() - began, 3)}
                lines.append(
                    json.dumps({**record, "path": "/v1/messages", "request": body, "response": answer})
                )
    with gzip.GzipFile(options.output, "wb", mtime=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    print(f"{len(lines)} requests in {options.output}")


if __name__ == "__main__":
    main()
