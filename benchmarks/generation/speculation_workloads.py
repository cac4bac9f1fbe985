# SPDX-License-Identifier: Apache-2.0
"""Prompts for the benchmarks of speculation: agents, editors and chats, of files of this repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from radixkv import SamplingParams

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

# The beginnings of 24 files as they were when the committed figures were taken, and a name in each: so the
# prompts stay the same while the repository's own files change. Eight of them are an edition.
_EDITED: list[dict[str, str]] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "edited_files.json").read_text(encoding="utf-8")
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


def _code_edit(file: dict[str, str]) -> str:
    path, name, lines = file["path"], file["name"], file["text"].splitlines()
    code, head = "\n".join(lines[:48]), "\n".join(lines[:3])
    return (
        f"Below is {path}. After it comes the same file again, unchanged but for {name}, which is now called "
        f"New{name}.\n\n```python\n{code}\n```\n\nThe same file, {name} renamed:\n\n```python\n{head}\n"
    )


def _agent_log(files: list[dict[str, str]]) -> str:
    """An agent that works through files: tool calls, and results that it quotes in the next call."""
    turns = []
    for step, file in enumerate(files[:4]):
        path = file["path"]
        listing = [
            f"{path}:{n}: {text.strip()}"
            for n, text in enumerate(file["text"].splitlines())
            if text.strip().startswith(("def ", "class ", "import ", "from "))
        ][:6]
        call = json.dumps({"tool": "grep", "arguments": {"pattern": "def |class |import", "path": path}})
        found = json.dumps({"exit_code": 0, "num_matches": len(listing), "matches": listing})
        turns.append(
            f"[step {step}] thought: I look for definitions in {path}.\ncall: {call}\nresult: {found}"
        )
    return (
        "\n".join(turns)
        + f"\n[step {len(turns)}] thought: I look for definitions in {files[0]['path']}.\ncall:"
    )


def prompts(tokenizer: Any, workload: str, edition: int = 0) -> list[list[int]]:
    """Eight prompts of a workload, as token ids; those of another edition (0 to 2) are about other things."""
    here = slice(8 * edition, 8 * edition + 8)
    files = _EDITED[here]
    if workload == "code edit":
        return [tokenizer.encode(_code_edit(file)) for file in files]
    if workload == "agent log":
        return [tokenizer.encode(_agent_log(files[i:] + files[:i])) for i in range(8)]
    if workload == "JSON with schema":
        keys = ", ".join(SCHEMA["properties"])
        texts = [f"Describe the file {file['path']} as a JSON object with the keys {keys}." for file in files]
    else:
        texts = list(_QUESTIONS[here])
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def sampling(workload: str, *, temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    """How a workload's answers are decoded."""
    if workload == "JSON with schema":
        return SamplingParams(max_tokens=160, temperature=temperature, seed=seed, structured={"json": SCHEMA})
    return SamplingParams(max_tokens=128, temperature=temperature, seed=seed, ignore_eos=True)


WORKLOADS = ("code edit", "agent log", "JSON with schema", "chat")
