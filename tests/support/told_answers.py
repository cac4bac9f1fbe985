# SPDX-License-Identifier: Apache-2.0
"""What the scripted model of the clients' trials says: what a prompt tells it to, or a test suite expects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: The last thing in a prompt that is to be said; programs put texts of their own around it.
_TOLD = re.compile(r".*say\{\{(.*?)\}\}say", re.DOTALL)


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in Hermes's form."""
    head = f'{{"name": {json.dumps(name)}, "arguments": '
    return f"<tool_call>\n{head}{_json(arguments)}}}\n</tool_call>"


def _json(value: Any) -> str:
    """Without blanks: grammars of JSON may allow none."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def told_answer(prompt: str) -> str:
    """The answer to a prompt that a `ByteTokenizer` rendered."""
    told = _TOLD.match(prompt)
    return told[1] if told else langchain_answer(prompt)


#: Questions of LangChain's standard tests, and calls by a model that can do what they ask for.
_CALLS: tuple[tuple[str, str, Any], ...] = (
    (r"value of magic_function\(3\)|Hello!", "magic_function", {"input": 3}),
    (r"value of magic_function_no_args\(\)", "magic_function_no_args", {}),
    (r"generate a Pirate greeting", "greeting_generator", {"answer_style": "Pirate"}),
    (r"weather in San Francisco", "get_weather", {"location": "San Francisco"}),
    (r"customer named '(?P<customer_name>.+?)'", "unicode_customer", {"description": "A company"}),
)
_JOKE = {"setup": "A cat walks into a library.", "punchline": "It is asked to be quiet."}


def langchain_answer(prompt: str) -> str:
    """What a model that reads its prompt would say in LangChain's standard tests."""
    found = re.match(r"tools:\[(.*?)\]\n", prompt)
    tools = re.findall(r"'(.+?)'", found[1]) if found else []
    last = prompt.rpartition("user\n")[2]
    if "joke about cats" in last:
        return call(tools[0], _JOKE) if tools else _json(_JOKE)
    if "tool\n" in last:
        return "That is the result."
    for question, name, arguments in _CALLS:
        asked = re.search(question, last)
        if asked and name in tools:
            return call(name, asked.groupdict() | arguments)
    return "I can say that."
