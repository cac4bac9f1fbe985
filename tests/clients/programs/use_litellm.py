# SPDX-License-Identifier: Apache-2.0
"""litellm against a server, with its OpenAI and its Anthropic provider; prints what it got as JSON."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

URL, KEY, CALL = os.environ["URL"], os.environ["KEY"], os.environ["CALL"]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
OPENAI = {"model": "openai/scripted", "api_base": URL + "/v1"}
ANTHROPIC = {"model": "anthropic/scripted", "api_base": URL}
called = []


def says(text: str) -> list:
    return [{"role": "user", "content": "say:" + text}]


def ask(messages: list, **options):
    return litellm.completion(
        messages=messages, **{"api_key": KEY, "max_tokens": 200, "num_retries": 0, **options}
    )


def loop(**options) -> str:
    messages = says(CALL)
    message = ask(messages, tools=[TOOL], **options).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        called.append(json.loads(call.function.arguments)["city"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "say:It is sunny."})
    return ask(messages, tools=[TOOL], **options).choices[0].message.content


def error_of(**options) -> int:
    try:
        ask(says("Hi."), **options)
    except (litellm.NotFoundError, litellm.AuthenticationError) as error:
        return error.status_code
    return 200


def use(provider: dict) -> dict:
    plain = ask(says("Hello there."), **provider)
    pieces = list(ask(says("Hello there."), stream=True, **provider))
    asynchronous = asyncio.run(
        litellm.acompletion(messages=says("Hello there."), api_key=KEY, max_tokens=200, **provider)
    )
    return {
        "plain": plain.choices[0].message.content,
        "async": asynchronous.choices[0].message.content,
        "usage": {
            "prompt": plain.usage.prompt_tokens,
            "cached": plain.usage.prompt_tokens_details.cached_tokens,
        },
        "stream": "".join(piece.choices[0].delta.content or "" for piece in pieces),
        "pieces": len(pieces),
        "tools": [loop(**provider)],
        "errors": {
            "model": error_of(**{**provider, "model": provider["model"].replace("scripted", "absent")}),
            "key": error_of(**{**provider, "api_key": "wrong"}),
        },
    }


def structured() -> dict:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    answer = ask(says('{"city":"Paris","degrees":21}'), response_format=wanted, **OPENAI)
    return json.loads(answer.choices[0].message.content)


chat = use(OPENAI)
chat["structured"] = [structured()]
print(json.dumps({"chat": chat, "messages": use(ANTHROPIC), "called": called}))
