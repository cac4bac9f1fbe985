# SPDX-License-Identifier: Apache-2.0
"""A streamed chat traced on its way through the server and the engine of this process.

Counted are the files of ours whose code runs for the chat, and its forms: the classes of ours that carry the
request or its answer. Code that also runs while nobody asks for anything is not on the way, and neither are
the rooms that work on the blocks and rows of all requests together (`MACHINE`), apart from files that define
a form.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from live_server import LiveServer, live_server
from pydantic import BaseModel
from tiny_models import CHAT_TEMPLATE, byte_level_tokenizer, save_tiny_model

from radixkv import EngineConfig, SamplingParams
from radixkv.entrypoints.async_engine import AsyncEngine

ROOT = Path(__file__).resolve().parents[2]
HOMES = tuple(f"{ROOT / folder}/" for folder in ("radixkv", "kernels", "server"))

#: Rooms whose code works on blocks, rows and tokens of all requests of a step together.
MACHINE = (
    "radixkv/cache/",
    "radixkv/grammar/",
    "radixkv/model/",
    "radixkv/sampling/",
    "radixkv/scheduling/",
    "radixkv/speculation/",
    "radixkv/tiers/",
    "kernels/",
)
#: Records that a step makes of all its requests.
OF_A_STEP = {"Batch", "Entry", "Row", "Sampling", "StepPlan", "StepOutcome", "StepResult", "_Command"}

BODY = {
    "messages": [
        {"role": "system", "content": "You answer in one short sentence. " * 6},
        {"role": "user", "content": "Where does the quick brown fox sleep?"},
    ],
    "stream": True,
    "max_tokens": 8,
    "temperature": 0.7,
    "seed": 3,
    "return_token_ids": True,
}


@dataclasses.dataclass
class RequestPath:
    """Files on the way of a chat, relative to the checkout, and the names of its forms with their modules."""

    files: set[str]
    forms: set[str]


class _Trace:
    """What runs while `runs` says so, as (file, function), and the objects of ours that take part."""

    def __init__(self) -> None:
        self.runs = False
        self.calls: set[tuple[str, str]] = set()
        self.objects: dict[int, Any] = {}

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if not self.runs or event not in ("call", "return"):
            return
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOMES) and code.co_name != "<module>":
            self.calls.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))
        for seen in (frame.f_locals.get("self"), value, *(value if type(value) in (tuple, list) else ())):
            if is_ours(seen):
                self.objects.setdefault(id(seen), seen)


def is_ours(value: Any) -> bool:
    """An instance of a class of ours."""
    return type(value).__module__.startswith("radixkv") and not isinstance(value, type)


def trace_chat(folder: Path) -> RequestPath:
    """Trace one streamed chat over HTTP; its prompt begins like that of a chat before it.

    Args:
        folder: for a tiny model; empty.
    """
    save_tiny_model(folder, "llama")
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    engine = AsyncEngine.from_config(EngineConfig(model=str(folder), num_blocks=64, max_model_len=512))
    try:
        return _trace_chat(engine)
    finally:
        asyncio.run(engine.close())


def _trace_chat(engine: AsyncEngine) -> RequestPath:
    trace = _Trace()
    threading.setprofile(trace)
    try:
        asyncio.run(engine.call(lambda _: sys.setprofile(trace)))
        with live_server(engine) as server:
            idle = _calls_while(trace, lambda: time.sleep(0.1))
            _calls_while(trace, lambda: _ask(server, "What is the time?"))
            known = set(trace.objects)
            events: list[dict[str, Any]] = []
            calls = _calls_while(trace, lambda: events.extend(_ask(server, None))) - idle
    finally:
        threading.setprofile(None)
    made = {name: value for name, value in trace.objects.items() if name not in known}
    forms = _forms(made, _Content(events))
    homes = {sys.modules[kind.__module__].__file__ or "" for kind in forms}
    files = {file for file, _ in calls if not file.startswith(MACHINE)}
    files |= {str(Path(home).relative_to(ROOT)) for home in homes}
    return RequestPath(files, {f"{kind.__module__}.{kind.__qualname__}" for kind in forms})


def _calls_while(trace: _Trace, work: Any) -> set[tuple[str, str]]:
    trace.calls = set()
    trace.runs = True
    work()
    trace.runs = False
    return trace.calls


def _ask(server: LiveServer, question: str | None) -> list[dict[str, Any]]:
    """The events of a chat; `question` stands for the body's own."""
    messages = [dict(message) for message in BODY["messages"]]
    messages[-1]["content"] = question or messages[-1]["content"]
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json={**BODY, "messages": messages})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


class _Content:
    """The prompt of a chat and its answer, to be found in objects."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        choices = [choice for event in events for choice in event["choices"]]
        self._question = BODY["messages"][-1]["content"]
        said = [choice["delta"].get("content") or "" for choice in choices]
        self._said = {text for text in said if len(text) > 1}
        self._prompt: list[int] = events[0]["prompt_token_ids"]
        self._answer = [token for choice in choices for token in choice.get("token_ids", ())]
        assert len(self._prompt) > 32
        assert len(self._answer) > 1

    def is_in(self, value: Any, depth: int = 5) -> bool:
        """The prompt, as text or ids, the sampling parameters, or a part of the answer is in plain data."""
        if isinstance(value, str | bytes | bytearray):
            data = value.encode() if isinstance(value, str) else bytes(value)
            ids = np.asarray(self._prompt, np.int32).tobytes()
            return (
                ids in data
                or self._question.encode() in data
                or (isinstance(value, str) and value in self._said)
            )
        if isinstance(value, np.ndarray):
            # Also where it has hashes of the tokens.
            is_prompt = value[: len(self._prompt)].tolist() == self._prompt
            return value.ndim == 1 and (is_prompt or len(value) == len(self._prompt))
        if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
            ids = list(value)
            return ids[: len(self._prompt)] == self._prompt or self._is_answered(ids)
        parts = value.values() if isinstance(value, Mapping) else value
        is_nested = isinstance(value, Mapping | list | tuple | set)
        return is_nested and depth > 0 and any(self.is_in(part, depth - 1) for part in parts)

    def _is_answered(self, ids: list[int]) -> bool:
        places = range(len(self._answer) - len(ids) + 1)
        return any(self._answer[place : place + len(ids)] == ids for place in places)


def _forms(made: dict[int, Any], content: _Content) -> set[type]:
    """Classes whose objects hold the content themselves, and records that hold such an object."""
    left = list(made.values())
    parts: dict[int, list[Any]] = {}
    while left:
        value = left.pop()
        inner = [part for item in _attributes(value).values() for part in _ours_in(item)]
        parts[id(value)] = inner
        for part in inner:
            if _is_record(part) and id(part) not in made:
                made[id(part)] = part
                left.append(part)
    made = {name: value for name, value in made.items() if type(value).__name__ not in OF_A_STEP}
    carriers = {
        name
        for name, value in made.items()
        if isinstance(value, SamplingParams) or any(map(content.is_in, _attributes(value).values()))
    }
    while True:
        more = {
            name
            for name, value in made.items()
            if name not in carriers
            and _is_record(value)
            and any(id(part) in carriers for part in parts[name])
        }
        if not more:
            return {type(made[name]) for name in carriers} - {
                type(value) for value in made.values() if _is_of_the_machine(value)
            }
        carriers |= more


def _is_of_the_machine(value: Any) -> bool:
    file = sys.modules[type(value).__module__].__file__ or ""
    relative = str(Path(file).relative_to(ROOT))
    owned = ("radixkv/cache/", "radixkv/model/", "radixkv/speculation/", "kernels/")
    return relative.startswith(owned)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, BaseModel) or hasattr(value, "_fields")


def _attributes(value: Any) -> dict[Any, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                found[name] = getattr(value, name)
    if isinstance(value, tuple):
        found.update(enumerate(value))
    return found


def _ours_in(value: Any, depth: int = 3) -> Iterator[Any]:
    if is_ours(value):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple | set):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _ours_in(part, depth - 1)


if __name__ == "__main__":  # lists them
    with tempfile.TemporaryDirectory() as made:
        path = trace_chat(Path(made))
    for what, names in (("files", path.files), ("forms", path.forms)):
        print(f"{len(names)} {what}", *sorted(names), sep="\n    ")
