# SPDX-License-Identifier: Apache-2.0
"""litellm over chat completions and Messages."""

import json
from importlib.metadata import version

import litellm
import report

WHERE = {
    "chat": {"model": "openai/" + report.MODEL, "api_base": report.URL + "/v1"},
    "messages": {"model": "anthropic/" + report.MODEL, "api_base": report.URL},
}[report.API]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


def ask(messages: list, **options):
    answer = litellm.completion(
        **WHERE, api_key=report.KEY, messages=messages, num_retries=0, max_tokens=400, **options
    )
    return answer.choices[0].message


report.version(version("litellm"))
messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.FIRST}]
first = ask(messages)
report.turn(first.content)
messages += [first.model_dump(exclude_none=True), {"role": "user", "content": report.SECOND}]
report.turn(ask(messages).content)
messages = [{"role": "user", "content": report.ASK_FOR_TOOL}]
choice = {"type": "function", "function": {"name": "weather"}}
forced = ask(messages, tools=[TOOL], tool_choice=choice)
(call,) = forced.tool_calls
report.called(json.loads(call.function.arguments))
messages += [
    forced.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": report.RESULT},
]
report.turn(ask(messages, tools=[TOOL]).content)
