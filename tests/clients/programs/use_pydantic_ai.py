# SPDX-License-Identifier: Apache-2.0
"""pydantic-ai against a server, over both of its APIs; prints what it got as JSON."""

import asyncio
import json
import os

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, CALL = os.environ["URL"], os.environ["KEY"], os.environ["CALL"]
called = []


class Weather(BaseModel):
    city: str
    degrees: int


def look(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "say:It is sunny."


async def error_of(model) -> int:
    try:
        await Agent(model).run("Hi.")
    except ModelHTTPError as error:
        return error.status_code
    return 200


async def use(kind) -> dict:
    provider = OpenAIProvider(base_url=URL + "/v1", api_key=KEY)
    model = kind("scripted", provider=provider)
    plain = await Agent(model, instructions="Be brief.").run("say:Hello there.")
    async with Agent(model).run_stream("say:Hello there.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    used = plain.usage() if callable(plain.usage) else plain.usage
    tools = await Agent(model, tools=[look]).run("say:" + CALL)
    native = await Agent(model, output_type=NativeOutput(Weather)).run('say:{"city":"Paris","degrees":21}')
    final = '<tool_call>\n{"name": "final", "arguments": {"city":"Paris","degrees":21}}\n</tool_call>'
    by_tool = await Agent(model, output_type=ToolOutput(Weather, name="final")).run("say:" + final)
    wrong = OpenAIProvider(base_url=URL + "/v1", api_key="wrong")
    return {
        "plain": plain.output,
        "usage": {"prompt": used.input_tokens, "cached": used.cache_read_tokens},
        "stream": "".join(pieces),
        "pieces": len(pieces),
        "tools": [tools.output],
        "structured": [native.output.model_dump(), by_tool.output.model_dump()],
        "errors": {
            "model": await error_of(kind("absent", provider=provider)),
            "key": await error_of(kind("scripted", provider=wrong)),
        },
    }


async def main() -> None:
    got = {"chat": await use(OpenAIChatModel), "responses": await use(OpenAIResponsesModel), "called": called}
    print(json.dumps(got))


asyncio.run(main())
