"""Prompts for the benchmarks of speculation: agents, editors and chats, made of this repository's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from radixkv import SamplingParams

ROOT = Path(__file__).resolve().parents[2]

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
    ("radixkv/scheduling/admission.py", "AdmissionControl"),
    ("radixkv/cache/eviction/slru.py", "SLRU"),
    # Edition 1.
    ("radixkv/cache/block_pool.py", "BlockPool"),
    ("radixkv/cache/lookup.py", "Lookup"),
    ("radixkv/cache/namespaces.py", "Namespaces"),
    ("radixkv/cache/moved_blocks.py", "Moved"),
    ("radixkv/scheduling/policy.py", "AdmissionPolicy"),
    ("radixkv/scheduling/sequence_state.py", "SequenceState"),
    ("radixkv/scheduling/waiting_queue.py", "WaitingQueue"),
    ("radixkv/engine/request_group.py", "RequestGroup"),
    # Edition 2.
    ("radixkv/cache/admission.py", "Admission"),
    ("radixkv/cache/radix_tree.py", "RadixTree"),
    ("radixkv/cache/invalidated_tree.py", "InvalidatedTree"),
    ("radixkv/scheduling/batch_check.py", "check_batch"),
    ("radixkv/scheduling/running.py", "RunningRequests"),
    ("radixkv/scheduling/scheduler.py", "Scheduler"),
    ("radixkv/scheduling/batch.py", "join_batches"),
    ("radixkv/engine/sample_output.py", "SampleOutput"),
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
    # Edition 1.
    "Why do cats purr?",
    "Write a letter to a friend who moved to another country.",
    "How do I repair a flat tyre?",
    "Explain what an eclipse is to a child.",
    "What should I pack for a week in the mountains?",
    "Give me advice for learning the piano as an adult.",
    "How does a refrigerator stay cold?",
    "Write a poem about an old train station.",
    # Edition 2.
    "Why is the sea salty?",
    "Write a short story about a baker who can't sleep.",
    "How do I grow tomatoes on a balcony?",
    "Explain what money is to a child.",
    "What should I see in Kyoto in one day?",
    "Give me advice for a speech at a wedding.",
    "How does a sailing boat go against the wind?",
    "Write a poem about the first snow.",
)


def _lines(path: str, count: int) -> str:
    return "\n".join((ROOT / path).read_text().splitlines()[:count])


def _code_edit(path: str, name: str) -> str:
    code = _lines(path, 48)
    head = "\n".join(code.splitlines()[:3])
    return (
        f"Below is {path}. After it comes the same file again, unchanged but for {name}, which is now called "
        f"New{name}.\n\n```python\n{code}\n```\n\nThe same file, {name} renamed:\n\n```python\n{head}\n"
    )


def _agent_log(paths: list[str]) -> str:
    """An agent that works through files: tool calls, and results that it quotes in the next call."""
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


def prompts(tokenizer: Any, workload: str, edition: int = 0) -> list[list[int]]:
    """Eight prompts of a workload, as token ids; those of another edition (0 to 2) are about other things."""
    here = slice(8 * edition, 8 * edition + 8)
    edited = _EDITED[here]
    if workload == "code edit":
        return [tokenizer.encode(_code_edit(path, name)) for path, name in edited]
    paths = [path for path, _ in edited]
    if workload == "agent log":
        return [tokenizer.encode(_agent_log(paths[i:] + paths[:i])) for i in range(8)]
    if workload == "JSON with schema":
        keys = ", ".join(SCHEMA["properties"])
        texts = [f"Describe the file {path} as a JSON object with the keys {keys}." for path in paths]
    else:
        texts = list(_QUESTIONS[here])
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def sampling(workload: str, *, temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    """How a workload's answers are decoded."""
    if workload == "JSON with schema":
        return SamplingParams(max_tokens=160, temperature=temperature, seed=seed, structured={"json": SCHEMA})
    return SamplingParams(max_tokens=128, temperature=temperature, seed=seed, ignore_eos=True)


WORKLOADS = ("code edit", "agent log", "JSON with schema", "chat")
