"""Prompts for `benchmarks.speculation`: agents, editors and chats, made of this repository's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from radixkv import SamplingParams

ROOT = Path(__file__).resolve().parent.parent

#: A record that an answer of the JSON workload must be.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file_name": {"type": "string", "maxLength": 40},
        "programming_language": {"enum": ["python", "rust", "c"]},
        "number_of_functions": {"type": "integer", "minimum": 0, "maximum": 99},
        "has_unit_tests": {"type": "boolean"},
        "maintainer": {
            "type": "object",
            "properties": {
                "first_name": {"type": "string", "maxLength": 20},
                "email_address": {"type": "string", "maxLength": 30},
            },
            "required": ["first_name", "email_address"],
            "additionalProperties": False,
        },
        "review_status": {"enum": ["accepted", "changes_requested", "waiting_for_review"]},
    },
    "required": [
        "file_name",
        "programming_language",
        "number_of_functions",
        "has_unit_tests",
        "maintainer",
        "review_status",
    ],
    "additionalProperties": False,
}

_EDITED = (
    ("radixkv/cache/block_table.py", "BlockTable"),
    ("radixkv/cache/leases.py", "Leases"),
    ("radixkv/cache/room.py", "Room"),
    ("radixkv/cache/pending_copies.py", "PendingCopies"),
    ("radixkv/scheduling/step_plan.py", "StepPlan"),
    ("radixkv/scheduling/in_flight_prefixes.py", "InFlightPrefixes"),
    ("radixkv/scheduling/preemption.py", "choose_victim"),
    ("radixkv/cache/eviction/slru.py", "SLRU"),
)
_QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a fox who finds a lighthouse.",
    "How do I cook rice without burning it?",
    "Explain what a hash table is to a child.",
    "What should I see in Lisbon in two days?",
    "Give me advice for a first job interview.",
    "How does a bicycle stay upright?",
    "Write a poem about rain in the city.",
)


def _lines(path: str, count: int) -> str:
    return "\n".join((ROOT / path).read_text().splitlines()[:count])


def _code_edit(i: int) -> str:
    path, name = _EDITED[i]
    code = _lines(path, 48)
    head = "\n".join(code.splitlines()[:3])
    return (
        f"Below is {path}. After it comes the same file again, unchanged but for {name}, which is now called "
        f"New{name}.\n\n```python\n{code}\n```\n\nThe same file, {name} renamed:\n\n```python\n{head}\n"
    )


def _agent_log(i: int) -> str:
    """An agent that works through files: tool calls, and results that it quotes in the next call."""
    paths = [path for path, _ in _EDITED[i:] + _EDITED[:i]]
    turns = []
    for step, path in enumerate(paths[:4]):
        listing = [
            f"{path}:{n}: {text.strip()}"
            for n, text in enumerate(_lines(path, 60).splitlines())
            if text.strip().startswith(("def ", "class ", "import ", "from "))
        ][:6]
        call = json.dumps({"tool": "grep", "arguments": {"pattern": "def |class |import", "path": path}})
        found = json.dumps({"exit_code": 0, "num_matches": len(listing), "matches": listing})
        turns.append(
            f"[step {step}] thought: I look for definitions in {path}.\ncall: {call}\nresult: {found}"
        )
    return "\n".join(turns) + f"\n[step {len(turns)}] thought: I look for definitions in {paths[0]}.\ncall:"


def prompts(tokenizer: Any, workload: str) -> list[list[int]]:
    """Eight prompts of a workload, as token ids."""
    if workload == "code edit":
        return [tokenizer.encode(_code_edit(i)) for i in range(8)]
    if workload == "agent log":
        return [tokenizer.encode(_agent_log(i)) for i in range(8)]
    if workload == "JSON with schema":
        keys = ", ".join(SCHEMA["properties"])
        texts = [f"Describe the file {path} as a JSON object with the keys {keys}." for path, _ in _EDITED]
    else:
        texts = list(_QUESTIONS)
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def sampling(workload: str, *, temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    """How a workload's answers are decoded."""
    if workload == "JSON with schema":
        return SamplingParams(max_tokens=160, temperature=temperature, seed=seed, structured={"json": SCHEMA})
    return SamplingParams(max_tokens=128, temperature=temperature, seed=seed, ignore_eos=True)


WORKLOADS = ("code edit", "agent log", "JSON with schema", "chat")
