# SPDX-License-Identifier: Apache-2.0
"""instructor over both of OpenAI's APIs and Messages: forced calls of tools, read into classes."""

from importlib.metadata import version

import instructor
import report
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class Told(BaseModel):
    text: str


def connect():
    if report.API == "messages":
        import anthropic

        client = anthropic.Anthropic(base_url=report.URL, api_key=report.KEY, max_retries=0)
        return instructor.from_anthropic(client)
    import openai

    client = openai.OpenAI(base_url=report.URL + "/v1", api_key=report.KEY, max_retries=0)
    mode = instructor.Mode.TOOLS if report.API == "chat" else instructor.Mode.RESPONSES_TOOLS
    return instructor.from_openai(client, mode=mode)


client = connect()


def ask(kind: type, messages: list):
    limit = {"max_output_tokens" if report.API == "responses" else "max_tokens": 400}
    return client.create(model=report.MODEL, messages=messages, response_model=kind, max_retries=0, **limit)


report.version(version("instructor"))
messages = [{"role": "system", "content": report.SYSTEM}, {"role": "user", "content": report.FIRST}]
first = ask(Told, messages)
report.turn(repr(first.text))
messages += [{"role": "assistant", "content": first.text or "-"}, {"role": "user", "content": report.SECOND}]
report.turn(repr(ask(Told, messages).text))
report.called(ask(Weather, [{"role": "user", "content": report.ASK_FOR_TOOL}]).model_dump())
