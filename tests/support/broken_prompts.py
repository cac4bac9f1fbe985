# SPDX-License-Identifier: Apache-2.0
"""Pairs of prompts of which the second one is broken in a known way, or in none: a labelled corpus.

    python tests/support/broken_prompts.py [--pairs 300] [--seed 0] [--bank develop|measure]

Each pair is made by a seeded generator from real system prompts and tools (tests/data/agent_prompts) and a
conversation with calls of tools. Two banks have nothing in common: other prompts, other words, other forms of
times, ids, names and warnings. One is to develop with, the other to measure with.
"""

from __future__ import annotations

import argparse
import base64
import copy
import datetime
import functools
import json
import random
import string
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "agent_prompts"

Chat = dict[str, Any]


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


@dataclass(frozen=True)
class Bank:
    """What pairs are made of.

    Args:
        prompts: files of tests/data/agent_prompts.
        times, ids, users, folders: lines for a system prompt, with a place for what changes.
        warnings: what is added to a tool's description.
        edits: sentences of a system prompt that somebody edited: nothing that has a name.
    """

    prompts: tuple[str, ...]
    times: tuple[tuple[str, Callable[[datetime.datetime], str]], ...]
    ids: tuple[tuple[str, Callable[[random.Random], str]], ...]
    users: tuple[str, ...]
    names: tuple[str, ...]
    folders: tuple[str, ...]
    paths: tuple[str, ...]
    warnings: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]
    examples: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]
    attachments: tuple[str, ...]
    summaries: tuple[str, ...]
    thoughts: tuple[str, ...]


def _hex(count: int) -> Callable[[random.Random], str]:
    return lambda rng: "".join(rng.choices("0123456789abcdef", k=count))


def _alnum(prefix: str, count: int) -> Callable[[random.Random], str]:
    letters = string.ascii_letters + string.digits
    return lambda rng: prefix + "".join(rng.choices(string.digits, k=2) + rng.choices(letters, k=count - 2))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_DAYS_DE = ("Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag")
_MONTHS_FR = (
    *("janvier", "février", "mars", "avril", "mai", "juin"),
    *("juillet", "août", "septembre", "octobre", "novembre", "décembre"),
)
_MONTHS_ES = (
    *("enero", "febrero", "marzo", "abril", "mayo", "junio"),
    *("julio", "agosto", "septiembre", "octubre", "noviembre", "diciembre"),
)

DEVELOP = Bank(
    prompts=("opencode", "harbour"),
    times=(
        ("Current time: {}", lambda t: t.isoformat(timespec="seconds") + "Z"),
        ("Today's date: {}", lambda t: t.strftime("%a %b %d %Y")),
        ("The date is {}.", lambda t: t.strftime("%Y-%m-%d")),
        ("It is {} now.", lambda t: t.strftime("%I:%M %p")),
        ("Heute ist {}.", lambda t: f"{_DAYS_DE[t.weekday()]}, der {t.day}.{t.month}.{t.year}"),
        ("timestamp={}", lambda t: str(int(t.timestamp()))),
        ("Nous sommes le {}.", lambda t: f"{t.day} {_MONTHS_FR[t.month - 1]} {t.year}"),
    ),
    ids=(
        ("Session ID: {}", _uuid),
        ("[request {}]", _alnum("req_", 14)),
        ("Conversation: {}", _hex(16)),
        ("trace_id={}", _hex(32)),
        ("<run id='{}'/>", _alnum("run-", 10)),
        ("Build {} of the assistant.", _hex(12)),
    ),
    users=(
        "You are helping {}.",
        "The user's name is {}.",
        "User: {}",
        "Hello {}!",
        "Signed in as {}.",
        "Benutzer: {}",
    ),
    names=("Ann Smith", "Bob", "María José", "Chen Wei", "Robert O'Hara", "Li", "Priya Patel", "Jörg Müller"),
    folders=(
        "Working directory: {}",
        "cwd={}",
        "<workspace>{}</workspace>",
        "You work in the repository at {}.",
    ),
    paths=(
        "/home/ann/harbour",
        "/home/bob/src/web-app",
        "/tmp/build-7/out",
        "C:\\Users\\eve\\site",
        "/workspace/api",
    ),
    warnings=(
        "Warning: this tool was slow lately.",
        "NOTE: 3 calls are left in this session.",
        "Deprecated, use another one where you can.",
        "IMPORTANT: results may be stale.",
    ),
    edits=(
        ("Be concise.", "Be friendly."),
        ("Never use emojis in answers.", "Use emojis where they help."),
        ("Answer in at most 4 lines.", "Answer in at most 6 lines."),
        ("Prefer Python 3.11.", "Prefer Python 3.12."),
        ("Write French.", "Write German."),
    ),
    examples=(
        ("2 + 2", "4"),
        ("is 11 a prime number?", "Yes, it is."),
        ("what files are in src?", "foo.c, bar.c and baz.c"),
        ("which command runs the tests?", "npm test does."),
        ("how tall is a giraffe?", "Up to 5 metres."),
        ("who wrote the readme?", "The first commit has it."),
        ("what is in the box?", "Nothing that I can see."),
    ),
    questions=(
        "Please look into the failing test and tell me why it fails.",
        "Where is the configuration of the logger?",
        "Add a flag that makes the output quiet.",
        "What does the second function do?",
        "Now write a test for it, please.",
        "Which of the two is faster, and by how much?",
    ),
    attachments=(
        "<file name='notes.txt'>\nThe pump was repaired in spring.\nIts seal is to be watched "
        "closely.\n</file>",
        "Attached: error.log\nTypeError: cannot read properties of undefined\n    at Object.run "
        "(main.js:14:3)",
    ),
    summaries=(
        "This session is being continued from a previous conversation. Summary: the user asked "
        "about a failing test.",
        "Summary of the conversation so far: a flag was wanted, and the logger's configuration was found.",
    ),
    thoughts=(
        "The user wants to know why it fails. I should look at the file first.",
        "Let me think step by step.",
    ),
)

MEASURE = Bank(
    prompts=("codex", "airline", "lehrerin"),
    times=(
        ("<current_datetime>{}</current_datetime>", lambda t: t.strftime("%Y-%m-%d %H:%M:%S.%f")),
        ("As of {}, all systems are up.", lambda t: t.strftime("%d/%m/%Y %H:%M")),
        ("Server clock: {}", lambda t: t.strftime("%a, %d %b %Y %H:%M:%S GMT")),
        ("now_ms: {}", lambda t: str(int(t.timestamp() * 1000))),
        ("La fecha de hoy es {}.", lambda t: f"{t.day} de {_MONTHS_ES[t.month - 1]} de {t.year}"),
        ("今日の日付: {}", lambda t: f"{t.year}年{t.month}月{t.day}日"),
        ("Week: {}", lambda t: t.strftime("%G-W%V-%u")),
        ("Generated {}.", lambda t: t.strftime("%B %d, %Y at %H:%M UTC")),
        ("Stand: {} Uhr", lambda t: t.strftime("%d.%m.%Y, %H.%M")),
        ("date: {}", lambda t: t.strftime("%Y%m%dT%H%M%SZ")),
    ),
    ids=(
        ("x-correlation-id: {}", _uuid),
        ("Sitzung {}", _alnum("S", 12)),
        ("Thread ID = {}", _alnum("thread_", 20)),
        ("(ticket {})", lambda rng: f"OPS-{rng.randrange(1000, 99999)}"),
        ("invocation:{}", lambda rng: _uuid(rng).replace("-", "").upper()),
        ("Ref. {} applies.", _alnum("01J", 23)),
        ("commit {}", _hex(40)),
        ("ID de sesión: {}", lambda rng: str(rng.randrange(10**6, 10**9))),
    ),
    users=(
        "You are talking to {} today.",
        "Customer name: {}",
        "Account holder: {}",
        "Dear {},",
        "Logged in user: {}",
        "El usuario se llama {}.",
        "ユーザー: {}",
        "{} is the user you assist.",
        "Du hilfst heute: Schülerin {}",
        "username: {}",
    ),
    names=(
        "Fatima al-Zahra",
        "Kwame Mensah",
        "Sofía Gómez",
        "Dr. Weber",
        "Tariq",
        "Nguyen Van An",
        "Olga Petrova",
        "Zoë",
    ),
    folders=(
        "<cwd>{}</cwd>",
        "Project root: {}",
        "Arbeitsverzeichnis: {}",
        "Files are read from the folder {} only.",
        "$ pwd\n{}",
    ),
    paths=(
        "/Users/olga/dev/shop",
        "/var/lib/jobs/4711/checkout",
        "~/code/planner",
        "D:\\projekte\\rechnung",
        "/mnt/data/team-b/repo",
        "/srv/agents/17/ws",
    ),
    warnings=(
        "Caution: rate limit nearly reached (17 of 20).",
        "[degraded: upstream returns errors]",
        "Achtung: zurzeit nur lesend.",
        "This tool is temporarily unavailable on weekends.",
        "⚠ Output is cut after 100 lines.",
        "Last call failed with a timeout.",
    ),
    edits=(
        ("Always confirm before you write.", "Never confirm before you write."),
        ("Use the metric system.", "Use imperial units."),
        ("Offer at most 3 choices.", "Offer at most 5 choices."),
        ("Your name is Max.", "Your name is Eva."),
        ("Du duzt alle.", "Du siezt alle."),
        ("Refunds take 10 days.", "Refunds take 14 days."),
        ("The reference model is gpt-4o.", "The reference model is gpt-5."),
        ("Use HTTP/1.1 for downloads.", "Use HTTP/2 for downloads."),
    ),
    examples=(
        ("Can I change my seat?", "Yes, until the doors close."),
        ("Wie viel ist ein Drittel von 9?", "Teile 9 durch 3. Was kommt heraus?"),
        ("Is breakfast included?", "Only in business class."),
        ("How do I undo the last edit?", "Run the command again with --undo."),
        ("¿Cuánto pesa la maleta?", "Como máximo 23 kilos."),
        ("Which port does it listen on?", "It prints the port when it starts."),
        ("Was ist eine Primzahl?", "Was weißt du schon über Teiler?"),
        ("May I bring my cat?", "In the cabin, in a bag."),
    ),
    questions=(
        "I would like to know what happens if I miss the connection.",
        "Kannst du mir das noch einmal erklären?",
        "Refactor the parser so that it streams.",
        "Gibt es dafür eine einfachere Lösung?",
        "And what would that cost with two bags?",
        "Run it again, this time with the other input.",
        "¿Y si lo hago mañana?",
    ),
    attachments=(
        "[Attachment: invoice 2231]\n2 seats in economy class, paid by card.\nOne bag of 21 kilos, "
        "no extra charge.",
        "```python\ndef area(radius):\n    return 3.14159 * radius * radius  # of the circle\n```",
        "<document index='1'>\nDas Dreieck hat einen rechten Winkel bei C und zwei gleiche "
        "Seiten.\n</document>",
    ),
    summaries=(
        "<summary>The customer asked about a missed connection, and was told of the next flight.</summary>",
        "Zusammenfassung des bisherigen Gesprächs: Es ging um Gleichungen, zwei wurden gelöst.",
        "Recap of earlier turns: the parser was read, a test was written.",
        "[Previous conversation compacted] The work so far: two files were changed.",
    ),
    thoughts=(
        "Okay, so first I need the reservation. Then the fare rules say what may be changed.",
        "Die Frage zielt auf Brüche. Ich gebe nur einen Hinweis.",
        "We need to inspect the parser before any change. Plan: read, edit, test.",
    ),
)
BANKS = {"develop": DEVELOP, "measure": MEASURE}


@functools.cache
def _prompt(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


class Maker:
    """Makes pairs from one bank."""

    def __init__(self, bank: Bank, seed: int) -> None:
        self.bank = bank
        self.rng = random.Random(seed)

    def pairs(self, count: int) -> Iterator[Pair]:
        """Pairs of each kind in turn, shuffled values; two of each round have nothing that breaks them."""
        made = 0
        while True:
            for kind in KINDS_MADE:
                if made == count:
                    return
                yield kind(self)
                made += 1

    def chat(self, turns: int | None = None) -> Chat:
        """A conversation with a system prompt, tools, calls and results; it ends with a question."""
        rng, bank = self.rng, self.bank
        prompt = _prompt(rng.choice(bank.prompts))
        tools = [{"type": "function", "function": copy.deepcopy(tool)} for tool in prompt["tools"]]
        messages: list[Any] = [{"role": "system", "content": prompt["system"]}]
        questions = rng.sample(bank.questions, len(bank.questions))
        for turn in range(turns if turns is not None else rng.randint(2, 3)):
            messages.append({"role": "user", "content": questions[turn]})
            name = rng.choice(tools)["function"]["name"]
            arguments = json.dumps(
                {"query": questions[turn][:20], "limit": rng.randint(1, 9), "deep": {"é": True}}
            )
            call = {
                "id": f"call_{turn}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": "I will look.", "tool_calls": [call]})
            result = json.dumps(
                {"found": [f"line {rng.randint(1, 99)}", "another"], "total": rng.randint(2, 40)}
            )
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": result})
            said = f"There are two places, and the first of them is number {rng.randint(1, 99)}."
            messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": questions[-1]})
        return {"messages": messages, "tools": tools}

    def next_turn(self, chat: Chat) -> Chat:
        """The same conversation, one turn later, or as it is: both happen."""
        later = copy.deepcopy(chat)
        if self.rng.random() < 0.7:
            later["messages"] += [
                {"role": "assistant", "content": "That is done, and it works now."},
                {
                    "role": "user",
                    "content": self.rng.choice(("Thank you. What is next?", "Gut. Und jetzt?", "ok")),
                },
            ]
        return later

    def inserted(self, chat: Chat, line: str) -> Chat:
        """The chat with a line of its own in the first part of its system prompt."""
        made = copy.deepcopy(chat)
        lines = made["messages"][0]["content"].split("\n")
        lines.insert(min(self._at, len(lines)), line)
        made["messages"][0]["content"] = "\n".join(lines)
        return made

    def two_lines(self, line: str, one: str, other: str, kind: str | None, how: str) -> Pair:
        """Two prompts with a line that differs in one value."""
        self._at = self.rng.choice((0, 1, 1, 2, 5))
        chat = self.chat()
        old = self.inserted(chat, line.format(one))
        return Pair(
            old,
            self.inserted(self.next_turn(chat), line.format(other)),
            kind,
            None if kind is None else 0,
            f"{how}: {line.format(one)!r} -> {line.format(other)!r}",
        )

    def two_of(self, values: Sequence[Any]) -> Any:
        return self.rng.sample(values, 2)


def timestamp(make: Maker) -> Pair:
    line, form = make.rng.choice(make.bank.times)
    one = datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=make.rng.randrange(300 * 86400))
    other = one
    while form(other) == form(one):
        other += datetime.timedelta(seconds=make.rng.choice((61, 3600, 86400, 400_000, 7_000_000)))
    return make.two_lines(line, form(one), form(other), "timestamp", "time")


def identifier(make: Maker) -> Pair:
    line, form = make.rng.choice(make.bank.ids)
    return make.two_lines(line, form(make.rng), form(make.rng), "id", "id")


def user_name(make: Maker) -> Pair:
    line = make.rng.choice(make.bank.users)
    one, other = make.two_of(make.bank.names)
    return make.two_lines(line, one, other, "user_name", "user")


def working_directory(make: Maker) -> Pair:
    one, other = make.two_of(make.bank.paths)
    if make.rng.random() < 0.4:
        chat = make.chat()
        later = make.next_turn(chat)
        at = make.rng.randrange(len(chat["tools"]))
        for made, path in ((chat, one), (later, other)):
            function = made["tools"][at]["function"]
            function["description"] += f" It runs in {path}."
        return Pair(
            chat,
            later,
            "working_directory",
            chat["tools"][at]["function"]["name"],
            f"folder in a tool: {other}",
        )
    return make.two_lines(make.rng.choice(make.bank.folders), one, other, "working_directory", "folder")


def metadata(make: Maker) -> Pair:
    rng = make.rng
    version = f"2.1.{rng.randrange(10, 400)}"
    entry = rng.choice(("cli", "sdk-cli", "vscode"))
    make._at = 0
    lines = [
        f"x-anthropic-billing-header: cc_version={version}.{_hex(3)(rng)}; cc_entrypoint={entry}; "
        f"cch={_hex(5)(rng)};"
        for _ in range(2)
    ]
    chat = make.chat()
    return Pair(
        make.inserted(chat, lines[0]),
        make.inserted(make.next_turn(chat), lines[1]),
        "client_metadata",
        0,
        "header",
    )


def tools_reordered(make: Maker) -> Pair:
    chat = make.chat()
    later = make.next_turn(chat)
    before = [tool["function"]["name"] for tool in chat["tools"]]
    while [tool["function"]["name"] for tool in later["tools"]] == before:
        make.rng.shuffle(later["tools"])
    after = [tool["function"]["name"] for tool in later["tools"]]
    first = next(b for a, b in zip(before, after, strict=True) if a != b)
    return Pair(chat, later, "tools_reordered", first, "shuffled tools")


def _turned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _turned(item) for key, item in reversed(value.items())}
    return [_turned(item) for item in value] if isinstance(value, list) else value


def schema_keys(make: Maker) -> Pair:
    chat = make.chat()
    later = make.next_turn(chat)
    at = make.rng.randrange(len(chat["tools"]))
    function = later["tools"][at]["function"]
    function["parameters"] = _turned(function["parameters"])
    if len(function["parameters"]) < 2:
        return schema_keys(make)
    return Pair(chat, later, "schema_keys_reordered", function["name"], "turned keys")


def tool_warning(make: Maker) -> Pair:
    chat = make.chat()
    later = make.next_turn(chat)
    at = make.rng.randrange(len(chat["tools"]))
    function = later["tools"][at]["function"]
    separator = make.rng.choice((" ", "\n", "\n\n"))
    warning = make.rng.choice(make.bank.warnings)
    text = function["description"]
    function["description"] = (
        f"{text}{separator}{warning}" if make.rng.random() < 0.7 else f"{warning}{separator}{text}"
    )
    if make.rng.random() < 0.3:
        chat["tools"], later["tools"] = later["tools"], chat["tools"]
    return Pair(chat, later, "tool_warning", function["name"], warning)


def examples(make: Maker) -> Pair:
    rng = make.rng
    if rng.random() < 0.2:
        return _shuffled_turns(make)
    head = rng.choice(
        (
            "# Examples",
            "Examples:",
            "<examples>",
            "Here are some examples:",
            "## Beispiele",
            "Few-shot examples:",
        )
    )
    close = "\n</examples>" if head == "<examples>" else ""
    form = rng.choice(("Q: {}\nA: {}", "User: {}\nAssistant: {}", "- {} -> {}", "Input: {}\nOutput: {}"))
    drawn = [rng.sample(make.bank.examples, 3) for _ in range(2)]
    if rng.random() < 0.4:
        drawn[1] = drawn[0][1:] + drawn[0][:1]
    while drawn[0] == drawn[1]:
        drawn[1] = rng.sample(make.bank.examples, 3)
    blocks = [head + "\n" + "\n".join(form.format(*one) for one in some) + close for some in drawn]
    return make.two_lines("{}", blocks[0], blocks[1], "examples", "examples")


def _shuffled_turns(make: Maker) -> Pair:
    """Examples that are turns of the chat, before the conversation itself."""
    chats = []
    drawn = make.rng.sample(make.bank.examples, 3)
    chat = make.chat(turns=0)
    for some, made in ((drawn, chat), (drawn[1:] + drawn[:1], make.next_turn(chat))):
        turns = [
            {"role": role, "content": text}
            for pair in some
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        chats.append({**made, "messages": [made["messages"][0], *turns, *made["messages"][1:]]})
    return Pair(chats[0], chats[1], "examples", 1, "shuffled turns")


def thinking(make: Maker) -> Pair:
    chat = make.chat()
    answers = [i for i, message in enumerate(chat["messages"]) if message["role"] == "assistant"]
    at = make.rng.choice(answers[: max(1, len(answers) - 1)])
    later = make.next_turn(chat)
    thought = make.rng.choice(make.bank.thoughts)
    if make.rng.random() < 0.5:
        chat["messages"][at]["reasoning_content"] = thought
    else:
        tag = make.rng.choice(("think", "thinking"))
        text = chat["messages"][at]["content"]
        chat["messages"][at]["content"] = f"<{tag}>\n{thought}\n</{tag}>\n\n{text}"
    return Pair(chat, later, "thinking_stripped", at, "thought")


def arguments(make: Maker) -> Pair:
    chat = make.chat()
    later = make.next_turn(chat)
    calls = [i for i, message in enumerate(chat["messages"]) if message.get("tool_calls")]
    at = make.rng.choice(calls)
    function = later["messages"][at]["tool_calls"][0]["function"]
    value = json.loads(function["arguments"])
    function["arguments"] = make.rng.choice(
        (
            lambda: json.dumps(value, separators=(",", ":")),
            lambda: json.dumps(value, ensure_ascii=False),
            lambda: json.dumps(_turned(value)),
            lambda: json.dumps(value, indent=2),
        )
    )()
    return Pair(chat, later, "arguments_reserialised", at, function["arguments"])


def attachment(make: Maker) -> Pair:
    chat = make.chat()
    later = make.next_turn(chat)
    users = [i for i, message in enumerate(chat["messages"]) if message["role"] == "user"]
    attached = make.rng.choice(make.bank.attachments)
    first = make.rng.choice(users[:-1])
    last = [i for i, message in enumerate(later["messages"]) if message["role"] == "user"][-1]
    for made, at in ((chat, first), (later, last)):
        text = made["messages"][at]["content"]
        made["messages"][at]["content"] = (
            f"{attached}\n\n{text}" if make.rng.random() < 0.5 else f"{text}\n{attached}"
        )
    return Pair(chat, later, "attachment_moved", first, "attachment")


def compaction(make: Maker) -> Pair:
    chat = make.chat(turns=3)
    later = make.next_turn(chat)
    way = make.rng.randrange(3)
    if way == 0:
        kept = make.rng.choice((1, 3, 5))
        summary = {"role": "user", "content": make.rng.choice(make.bank.summaries)}
        later["messages"] = [later["messages"][0], summary, *later["messages"][-kept:]]
        return Pair(chat, later, "compaction", 1, "summary")
    if way == 1:
        later["messages"] = [later["messages"][0], *later["messages"][make.rng.choice((5, 9)) :]]
        return Pair(chat, later, "compaction", 1, "dropped")
    results = [i for i, message in enumerate(chat["messages"]) if message["role"] == "tool"]
    at = results[0]
    chat["messages"][at]["content"] += "\n" + "\n".join(f"line {n} of the result" for n in range(30))
    later["messages"][at]["content"] = make.rng.choice(
        ("[Old tool result content cleared]", "(output omitted)", "[... truncated to save context ...]")
    )
    return Pair(chat, later, "compaction", at, "cleared")


def whitespace(make: Maker) -> Pair:
    chat = make.chat()
    later = make.next_turn(chat)
    at = make.rng.randrange(len(chat["messages"]) - 1)
    text = later["messages"][at]["content"]
    later["messages"][at]["content"] = make.rng.choice(
        (
            f"{text}\n",
            f" {text}",
            text.replace(" ", "  ", 1),
            f"{text}\u200b",
            f"\n\n{text}",
            text.replace(" ", "\u00a0", 1),
        )
    )
    return Pair(chat, later, "whitespace", at, "white space")


def image(make: Maker) -> Pair:
    rng = make.rng
    chat = make.chat()
    later = make.next_turn(chat)
    users = [i for i, message in enumerate(chat["messages"]) if message["role"] == "user"]
    at = rng.choice(users[:-1])
    data = [base64.b64encode(rng.randbytes(60)).decode() for _ in range(2)]
    one = f"data:image/png;base64,{data[0]}"
    other = rng.choice(
        (f"data:image/png;base64,{data[1]}", "[image removed]", "[Image #1]", "(screenshot omitted)", "")
    )
    for made, what in ((chat, one), (later, other)):
        text = made["messages"][at]["content"]
        made["messages"][at]["content"] = f"{text}\n{what}"
    return Pair(chat, later, "image_replaced", at, other[:30])


def nothing(make: Maker) -> Pair:
    """The next turn, another question, another conversation, the same again."""
    rng = make.rng
    way = rng.randrange(4)
    chat = make.chat()
    if way == 0:
        later = make.next_turn(chat)
        return Pair(chat, later, None, None, "the next turn")
    if way == 1:
        later = copy.deepcopy(chat)
        later["messages"][-1]["content"] = rng.choice(
            ("What happened on 2024-05-17?", "Is Ann Smith on board?", "Look at /home/eve/x, please.", "Why?")
        )
        chat["messages"][-1]["content"] = rng.choice(
            ("What happened on 2023-04-02?", "Is Bob on board?", "How?")
        )
        return Pair(chat, later, None, None, "another question")
    if way == 2:
        later = copy.deepcopy(chat)
        other = make.chat()["messages"][1:]
        while other[0] == later["messages"][1]:
            other = make.chat()["messages"][1:]
        later["messages"] = [later["messages"][0], *other]
        return Pair(chat, later, None, None, "another conversation")
    return Pair(chat, copy.deepcopy(chat), None, None, "the same")


def edited(make: Maker) -> Pair:
    """Somebody edited the system prompt, or it is another agent's: that has no name."""
    if make.rng.random() < 0.25:
        one, other = make.chat(), make.chat()
        while other["messages"][0] == one["messages"][0]:
            other = make.chat()
        other["tools"] = one["tools"]
        return Pair(one, other, None, None, "another agent")
    one, other = make.rng.choice(make.bank.edits)
    return make.two_lines("{}", one, other, None, "edited")


#: One of each, in this order.
KINDS_MADE: tuple[Callable[[Maker], Pair], ...] = (
    *(timestamp, identifier, user_name, working_directory, metadata),
    *(tools_reordered, schema_keys, tool_warning, examples, thinking, arguments),
    *(attachment, compaction, whitespace, image, nothing, edited),
)


def make_pairs(bank: str, seed: int, count: int) -> list[Pair]:
    """A corpus. The same arguments make the same one."""
    return list(Maker(BANKS[bank], seed).pairs(count))


@dataclass
class Score:
    """How a corpus was judged.

    Attributes:
        right: pairs with a known break of which kind and place were named, and those without, of which none
            was.
        false_alarms: pairs without a known break of which one was named.
        wrong: how the others were made, and what was said of them.
    """

    total: int
    right: int
    false_alarms: int
    wrong: list[tuple[Pair, str]]


def judge(pairs: Sequence[Pair]) -> Score:
    """What `find_breaker` says of each pair."""
    from radixkv.observe.prompt_difference import find_breaker
    from radixkv.observe.prompt_parts import PromptParts

    right, alarms, wrong = 0, 0, []
    for pair in pairs:
        found = find_breaker(PromptParts.of_chat(**pair.old), PromptParts.of_chat(**pair.new))
        kind = None if found is None or found.kind == "unknown" else found.kind
        place = (
            None if found is None or kind is None else found.tool if found.message is None else found.message
        )
        if kind == pair.kind and place == pair.place:
            right += 1
        else:
            wrong.append((pair, f"{kind} at {place}: {found}"))
            alarms += pair.kind is None
    return Score(len(pairs), right, alarms, wrong)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=300)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--bank", choices=sorted(BANKS), default="measure")
    asked = options.parse_args()
    score = judge(make_pairs(asked.bank, asked.seed, asked.pairs))
    for pair, said in score.wrong:
        print(f"{pair.kind} at {pair.place} ({pair.how[:160]}): {said[:300]}")
    kinds = Counter(str(pair.kind) for pair, _ in score.wrong)
    print(
        f"{asked.bank} seed {asked.seed}: {score.right} of {score.total} right, "
        f"{score.false_alarms} false alarms {dict(kinds)}"
    )


if __name__ == "__main__":
    main()
