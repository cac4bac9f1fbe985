# SPDX-License-Identifier: Apache-2.0
"""langchain-openai against a server, over both of its APIs; prints what it got as JSON."""

import json
import os

import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, KEY, CALL = os.environ["URL"], os.environ["KEY"], os.environ["CALL"]
called = []


class Weather(BaseModel):
    """The weather."""

    city: str
    degrees: int


@tool
def look(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "say:It is sunny."


def client(model: str = "scripted", key: str = KEY, **options) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=URL + "/v1", api_key=key, max_retries=0, **options)


def usage(message) -> dict:
    used = message.usage_metadata
    return {"prompt": used["input_tokens"], "cached": used["input_token_details"]["cache_read"]}


def loop(model: ChatOpenAI) -> str:
    bound = model.bind_tools([look])
    messages = [HumanMessage("say:" + CALL)]
    answer = bound.invoke(messages)
    messages.append(answer)
    messages += [look.invoke(call) for call in answer.tool_calls]
    return bound.invoke(messages).text


def error_of(model: ChatOpenAI) -> int:
    try:
        model.invoke("Hi.")
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def use(**options) -> dict:
    model = client(stream_usage=True, **options)
    plain = model.invoke("say:Hello there.")
    pieces = list(model.stream("say:Hello there."))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    methods = ["json_schema"] if options else ["json_schema", "function_calling"]
    says = {
        "json_schema": 'say:{"city":"Paris","degrees":21}',
        "function_calling": 'say:<tool_call>\n{"name": "Weather", "arguments": {"city":"Paris","degrees":21}}'
        "\n</tool_call>",
    }
    return {
        "plain": plain.text,
        "usage": usage(plain),
        "stream": whole.text,
        "stream_usage": usage(whole),
        "pieces": len(pieces),
        "tools": [loop(model)],
        "structured": [
            model.with_structured_output(Weather, method=method).invoke(says[method]).model_dump()
            for method in methods
        ],
        "errors": {
            "model": error_of(client("absent", **options)),
            "key": error_of(client(key="wrong", **options)),
        },
    }


def chain() -> list:
    model = client(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("say:One.")
    second = model.invoke([HumanMessage("say:One."), first, HumanMessage("say:Two.")])
    return [first.text, second.text, usage(first)["prompt"], usage(second)["prompt"]]


print(
    json.dumps({"chat": use(), "responses": use(use_responses_api=True), "chain": chain(), "called": called})
)
