# SPDX-License-Identifier: Apache-2.0
"""openai-agents against a server, over both of its APIs; prints what it got as JSON."""

import asyncio
import json
import os

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

URL, KEY, CALL = os.environ["URL"], os.environ["KEY"], os.environ["CALL"]
called = []


class Weather(BaseModel):
    city: str
    degrees: int


@function_tool
def look(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "say:It is sunny."


def usage(result) -> dict:
    used = result.context_wrapper.usage
    return {"prompt": used.input_tokens, "cached": used.input_tokens_details.cached_tokens}


async def use(make_model, client: openai.AsyncOpenAI) -> dict:
    model = make_model("scripted", client)
    agent = Agent(name="plain", instructions="Be brief.", model=model)
    plain = await Runner.run(agent, "say:Hello there.")
    streamed = Runner.run_streamed(agent, "say:Hello there.")
    pieces = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    with_tools = await Runner.run(Agent(name="tools", model=model, tools=[look]), "say:" + CALL)
    with_tools_streamed = Runner.run_streamed(Agent(name="tools", model=model, tools=[look]), "say:" + CALL)
    async for _ in with_tools_streamed.stream_events():
        pass
    structured = await Runner.run(
        Agent(name="structured", model=model, output_type=Weather), 'say:{"city":"Paris","degrees":21}'
    )
    errors = {}
    try:
        await Runner.run(Agent(name="absent", model=make_model("absent", client)), "Hi.")
    except openai.APIStatusError as error:
        errors["model"] = error.status_code
    try:
        wrong = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="wrong", max_retries=0)
        await Runner.run(Agent(name="wrong", model=make_model("scripted", wrong)), "Hi.")
    except openai.APIStatusError as error:
        errors["key"] = error.status_code
    return {
        "plain": plain.final_output,
        "usage": usage(plain),
        "stream": "".join(pieces),
        "pieces": len(pieces),
        "tools": [with_tools.final_output, with_tools_streamed.final_output],
        "structured": structured.final_output.model_dump(),
        "errors": errors,
    }


async def chain(client: openai.AsyncOpenAI) -> list:
    agent = Agent(name="chain", model=OpenAIResponsesModel("scripted", client))
    first = await Runner.run(agent, "say:One.")
    second = await Runner.run(agent, "say:Two.", previous_response_id=first.last_response_id)
    return [first.final_output, second.final_output, usage(first)["prompt"], usage(second)["prompt"]]


async def main() -> None:
    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0) as client:
        got = {
            "chat": await use(OpenAIChatCompletionsModel, client),
            "responses": await use(OpenAIResponsesModel, client),
            "chain": await chain(client),
            "called": called,
        }
    print(json.dumps(got))


asyncio.run(main())
