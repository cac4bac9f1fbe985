# SPDX-License-Identifier: Apache-2.0
"""Pairs of prompts of which the second one is broken in a known way, or in none: a labelled corpus.

Each pair is made by a seeded generator from real system prompts and tools (tests/data/agent_prompts) and a
conversation with calls of tools. Two banks (tests/data/broken_prompts.json) have nothing in common: other
prompts, other words, other forms of times, ids, names and warnings. One is to develop with, the other to
measure with.
"""

from __future__ import annotations

import base64
import copy
import datetime
import functools
import json
import random
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
_FILE = json.loads((DATA / "broken_prompts.json").read_text(encoding="utf-8"))
#: Name of a bank -> what its pairs are made of: lines and sentences, by what they are.
BANKS: dict[str, dict[str, list[Any]]] = _FILE["banks"]
_WORDS: dict[str, list[str]] = _FILE["words"]

Chat = dict[str, Any]
#: What a pair breaks (None: nothing that has a name), where, and what was done.
Label = tuple[str | None, int | str | None, str]


@dataclass(frozen=True)
class Pair:
    """Two chats, and what the second one breaks.

    Args:
        kind: one of `radixkv.observe.causes.CAUSES`; None: nothing breaks, or nothing that has a name.
        place: index of the message, or name of the tool; None: none.
        how: what the generator did, for reports.
    """

    old: Chat
    new: Chat
    kind: str | None
    place: int | str | None
    how: str


@functools.cache
def _prompt(name: str) -> Any:
    return json.loads((DATA / "agent_prompts" / f"{name}.json").read_text(encoding="utf-8"))


def _told(line: str, time: datetime.datetime) -> str:
    """A line with a time in its form."""
    words = {
        name: known[time.weekday() if name.startswith("day") else time.month - 1]
        for name, known in _WORDS.items()
    }
    return line.format(t=time, s=int(time.timestamp()), **words)


class _Id:
    """Random ids by their formats: x16 is 16 hex digits, X16 upper case, a16 letters and digits, u a UUID."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __format__(self, form: str) -> str:
        kind, count, rng = form[0], int(form[1:] or 0), self._rng
        if kind == "u":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if kind in "xX":
            text = "".join(rng.choices("0123456789abcdef", k=count))
            return text.upper() if kind == "X" else text
        letters = string.digits + (string.ascii_letters if kind == "a" else "")
        return "".join(rng.choices(string.digits[1:], k=2) + rng.choices(letters, k=count - 2))


def _turned(value: Any) -> Any:
    """JSON with all keys in the opposite order."""
    if isinstance(value, dict):
        return {key: _turned(item) for key, item in reversed(value.items())}
    return [_turned(item) for item in value] if isinstance(value, list) else value


def _places(chat: Chat, role: str) -> list[int]:
    return [i for i, message in enumerate(chat["messages"]) if message["role"] == role]


class Maker:
    """Makes pairs from one bank."""

    def __init__(self, bank: dict[str, list[Any]], seed: int) -> None:
        self.bank = bank
        self.rng = random.Random(seed)

    def pairs(self) -> Iterator[Pair]:
        """Pairs of each kind in turn, without end; two of each round have nothing that breaks them."""
        while True:
            for make in KINDS_MADE:
                old = self.chat()
                new = self.next_turn(old)
                label = make(self, old, new)
                yield Pair(old, new, *label)

    def one_of(self, what: str) -> Any:
        return self.rng.choice(self.bank[what])

    def chat(self, turns: int | None = None) -> Chat:
        """A conversation with a system prompt, tools, calls and results; it ends with a question."""
        rng = self.rng
        prompt = _prompt(self.one_of("prompts"))
        tools = [{"type": "function", "function": copy.deepcopy(tool)} for tool in prompt["tools"]]
        messages: list[Any] = [{"role": "system", "content": prompt["system"]}]
        questions = rng.sample(self.bank["questions"], len(self.bank["questions"]))
        for turn, question in enumerate(questions[: rng.randint(2, 3) if turns is None else turns]):
            given = {"query": question[:20], "limit": rng.randint(1, 9), "deep": {"é": True}}
            called = {"name": rng.choice(tools)["function"]["name"], "arguments": json.dumps(given)}
            call = {"id": f"call_{turn}", "type": "function", "function": called}
            found = {"found": [f"line {rng.randint(1, 99)}", "another"], "total": rng.randint(2, 40)}
            said = f"There are two places, and the first of them is number {rng.randint(1, 99)}."
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "I will look.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call_{turn}", "content": json.dumps(found)},
                {"role": "assistant", "content": said},
            ]
        messages.append({"role": "user", "content": questions[-1]})
        return {"messages": messages, "tools": tools}

    def next_turn(self, chat: Chat) -> Chat:
        """The same conversation, one turn later, or as it is: both happen."""
        later = copy.deepcopy(chat)
        if self.rng.random() < 0.7:
            asked = self.rng.choice(("Thank you. What is next?", "Gut. Und jetzt?", "ok"))
            later["messages"] += [
                {"role": "assistant", "content": "That is done, and it works now."},
                {"role": "user", "content": asked},
            ]
        return later

    def insert(self, old: Chat, new: Chat, one: str, other: str, at: int | None = None) -> str:
        """Put a line into the first part of each system prompt; returns what was done."""
        at = self.rng.choice((0, 1, 1, 2, 5)) if at is None else at
        for chat, line in ((old, one), (new, other)):
            lines = chat["messages"][0]["content"].split("\n")
            lines.insert(min(at, len(lines)), line)
            chat["messages"][0]["content"] = "\n".join(lines)
        return f"{one!r} -> {other!r}"


def timestamp(make: Maker, old: Chat, new: Chat) -> Label:
    line = make.one_of("times")
    one = datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=make.rng.randrange(300 * 86400))
    other = one
    while _told(line, other) == _told(line, one):
        other += datetime.timedelta(seconds=make.rng.choice((61, 3600, 86400, 400_000, 7_000_000)))
    return "timestamp", 0, make.insert(old, new, _told(line, one), _told(line, other))


def identifier(make: Maker, old: Chat, new: Chat) -> Label:
    line = make.one_of("ids")
    return "id", 0, make.insert(old, new, *(line.format(_Id(make.rng)) for _ in range(2)))


def user_name(make: Maker, old: Chat, new: Chat) -> Label:
    line = make.one_of("users")
    names = make.rng.sample(make.bank["names"], 2)
    return "user_name", 0, make.insert(old, new, *map(line.format, names))


def working_directory(make: Maker, old: Chat, new: Chat) -> Label:
    paths = make.rng.sample(make.bank["paths"], 2)
    if make.rng.random() < 0.6:
        line = make.one_of("folders")
        return "working_directory", 0, make.insert(old, new, *map(line.format, paths))
    at = make.rng.randrange(len(old["tools"]))
    for chat, path in zip((old, new), paths, strict=True):
        chat["tools"][at]["function"]["description"] += f" It runs in {path}."
    return "working_directory", old["tools"][at]["function"]["name"], f"folder in a tool: {paths[1]}"


def metadata(make: Maker, old: Chat, new: Chat) -> Label:
    rng = make.rng
    head = f"x-anthropic-billing-header: cc_version=2.1.{rng.randrange(10, 400)}"
    entry, drawn = rng.choice(("cli", "sdk-cli", "vscode")), _Id(rng)
    lines = [f"{head}.{drawn:x3}; cc_entrypoint={entry}; cch={drawn:x5};" for _ in range(2)]
    return "client_metadata", 0, make.insert(old, new, *lines, at=0)


def tools_reordered(make: Maker, old: Chat, new: Chat) -> Label:
    while new["tools"] == old["tools"]:
        make.rng.shuffle(new["tools"])
    pairs = zip(old["tools"], new["tools"], strict=True)
    first = next(after for before, after in pairs if before != after)
    return "tools_reordered", first["function"]["name"], "shuffled tools"


def schema_keys(make: Maker, old: Chat, new: Chat) -> Label:
    several = [tool["function"] for tool in new["tools"] if len(tool["function"]["parameters"]) > 1]
    function = make.rng.choice(several)
    function["parameters"] = _turned(function["parameters"])
    return "schema_keys_reordered", function["name"], "turned keys"


def tool_warning(make: Maker, old: Chat, new: Chat) -> Label:
    function = make.rng.choice(new["tools"])["function"]
    parts = [function["description"], make.one_of("warnings")]
    parts = parts if make.rng.random() < 0.7 else parts[::-1]
    function["description"] = make.rng.choice((" ", "\n", "\n\n")).join(parts)
    if make.rng.random() < 0.3:
        old["tools"], new["tools"] = new["tools"], old["tools"]
    return "tool_warning", function["name"], " ".join(parts)[-160:]


def examples(make: Maker, old: Chat, new: Chat) -> Label:
    rng, bank = make.rng, make.bank["examples"]
    one = rng.sample(bank, 3)
    other = one[1:] + one[:1]
    if rng.random() < 0.2:  # turns of the chat, before the conversation itself
        old.update(make.chat(turns=0))
        new.update(make.next_turn(old))
        for chat, some in ((old, one), (new, other)):
            pairs = [zip(("user", "assistant"), pair, strict=True) for pair in some]
            chat["messages"][1:1] = [{"role": role, "content": text} for pair in pairs for role, text in pair]
        return "examples", 1, "shuffled turns"
    heads = ("# Examples", "Examples:", "<examples>", "Here are some examples:", "## Beispiele")
    head = rng.choice((*heads, "Few-shot examples:"))
    close = "\n</examples>" if head == "<examples>" else ""
    form = rng.choice(("Q: {}\nA: {}", "User: {}\nAssistant: {}", "- {} -> {}", "Input: {}\nOutput: {}"))
    if rng.random() < 0.6:
        other = rng.sample([example for example in bank if example not in one[:1]], 3)
    blocks = [head + "\n" + "\n".join(form.format(*each) for each in some) + close for some in (one, other)]
    return "examples", 0, make.insert(old, new, *blocks)


def thinking(make: Maker, old: Chat, new: Chat) -> Label:
    answers = _places(old, "assistant")
    at = make.rng.choice(answers[: max(1, len(answers) - 1)])
    thought, message = make.one_of("thoughts"), old["messages"][at]
    if make.rng.random() < 0.5:
        message["reasoning_content"] = thought
    else:
        tag = make.rng.choice(("think", "thinking"))
        message["content"] = f"<{tag}>\n{thought}\n</{tag}>\n\n{message['content']}"
    return "thinking_stripped", at, "thought"


def arguments(make: Maker, old: Chat, new: Chat) -> Label:
    at = make.rng.choice([i for i, message in enumerate(old["messages"]) if message.get("tool_calls")])
    function = new["messages"][at]["tool_calls"][0]["function"]
    value = json.loads(function["arguments"])
    forms: tuple[dict[str, Any], ...] = ({"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 2})
    written = [json.dumps(_turned(value)), *(json.dumps(value, **form) for form in forms)]
    function["arguments"] = make.rng.choice(written)
    return "arguments_reserialised", at, function["arguments"]


def attachment(make: Maker, old: Chat, new: Chat) -> Label:
    attached, first = make.one_of("attachments"), make.rng.choice(_places(old, "user")[:-1])
    for chat, at in ((old, first), (new, _places(new, "user")[-1])):
        message = chat["messages"][at]
        before, after = f"{attached}\n\n{message['content']}", f"{message['content']}\n{attached}"
        message["content"] = before if make.rng.random() < 0.5 else after
    return "attachment_moved", first, "attachment"


def compaction(make: Maker, old: Chat, new: Chat) -> Label:
    old.update(make.chat(turns=3))
    new.update(make.next_turn(old))
    system, *said = new["messages"]
    way = make.rng.choice(("summary", "dropped", "cleared"))
    if way == "summary":
        summary = {"role": "user", "content": make.one_of("summaries")}
        kept = new["messages"][make.rng.choice(_places(new, "user")[-2:]) :]
        new["messages"] = [system, summary, *kept]
        return "compaction", 1, way
    if way == "dropped":
        new["messages"] = [system, *said[make.rng.choice((4, 8)) :]]
        return "compaction", 1, way
    at = _places(old, "tool")[0]
    old["messages"][at]["content"] += "\n" + "\n".join(f"line {n} of the result" for n in range(30))
    new["messages"][at]["content"] = make.rng.choice(
        ("[Old tool result content cleared]", "(output omitted)", "[... truncated to save context ...]")
    )
    return "compaction", at, way


def whitespace(make: Maker, old: Chat, new: Chat) -> Label:
    at = make.rng.randrange(len(old["messages"]) - 1)
    text = new["messages"][at]["content"]
    around = [form.format(text) for form in ("{}\n", " {}", "{}\u200b", "\n\n{}")]
    within = [text.replace(" ", wide, 1) for wide in ("  ", "\u00a0")]
    new["messages"][at]["content"] = make.rng.choice(around + within)
    return "whitespace", at, "white space"


def image(make: Maker, old: Chat, new: Chat) -> Label:
    at = make.rng.choice(_places(old, "user")[:-1])
    one, two = (
        f"data:image/png;base64,{base64.b64encode(make.rng.randbytes(60)).decode()}" for _ in range(2)
    )
    other = make.rng.choice((two, "[image removed]", "[Image #1]", "(screenshot omitted)", ""))
    old["messages"][at]["content"] += f"\n{one}"
    new["messages"][at]["content"] += f"\n{other}"
    return "image_replaced", at, other[:30]


def nothing(make: Maker, old: Chat, new: Chat) -> Label:
    """The next turn, another question, another conversation, the same again."""
    rng = make.rng
    way = rng.choice(("the next turn", "another question", "another conversation", "the same"))
    if way != "the next turn":
        new["messages"] = copy.deepcopy(old["messages"])
    if way == "another question":
        asked = (
            "What happened on 2024-05-17?",
            "Is Ann Smith on board?",
            "Look at /home/eve/x, please.",
            "Why?",
        )
        new["messages"][-1]["content"] = rng.choice(asked)
        old["messages"][-1]["content"] = rng.choice(
            ("What happened on 2023-04-02?", "Is Bob on board?", "How?")
        )
    while way == "another conversation" and new["messages"][1] == old["messages"][1]:
        new["messages"][1:] = make.chat()["messages"][1:]
    return None, None, way


def edited(make: Maker, old: Chat, new: Chat) -> Label:
    """Somebody edited the system prompt, or it is another agent's: that has no name."""
    if make.rng.random() < 0.75:
        return None, None, make.insert(old, new, *make.one_of("edits"))
    while new["messages"][0] == old["messages"][0]:
        new["messages"] = make.chat()["messages"]
    return None, None, "another agent"


#: One of each, in this order.
KINDS_MADE: tuple[Callable[[Maker, Chat, Chat], Label], ...] = (
    *(timestamp, identifier, user_name, working_directory, metadata),
    *(tools_reordered, schema_keys, tool_warning, examples, thinking, arguments),
    *(attachment, compaction, whitespace, image, nothing, edited),
)


def make_pairs(bank: str, seed: int, count: int) -> list[Pair]:
    """A corpus. The same arguments make the same one."""
    pairs = Maker(BANKS[bank], seed).pairs()
    return [next(pairs) for _ in range(count)]
