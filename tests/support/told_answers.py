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
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


#: Questions of LangChain's standard tests, and answers of a model that can do what they ask for.
LANGCHAIN = (
    (r"value of magic_function\(3\)", call("magic_function", {"input": 3})),
    (r"value of magic_function_no_args\(\)", call("magic_function_no_args", {})),
    (r"generate a Pirate greeting", call("greeting_generator", {"answer_style": "Pirate"})),
    (r"weather in San Francisco", call("get_weather", {"location": "San Francisco"})),
    (
        r"customer named '(.+?)'",
        call("unicode_customer", {"customer_name": r"\1", "description": "A company"}),
    ),
)


def told_answer(prompt: str) -> str:
    """The answer to a prompt."""
    told = _TOLD.match(prompt)
    if told:
        return told[1]
    last = prompt.rpartition("user\n")[2]
    for question, answer in LANGCHAIN:
        found = re.search(question, last)
        # A result below the question: the call has been made.
        if found and "\ntool\n" not in last and "tool_response" not in last:
            return found.expand(answer.replace("\\n", "\\\\n")) if "\\1" in answer else answer
    return "I can say that."
