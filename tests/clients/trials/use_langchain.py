# SPDX-License-Identifier: Apache-2.0
"""langchain-openai over both of its APIs, langchain-anthropic over Messages."""

from importlib.metadata import version

import report
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    report.called({"city": city, "days": days})
    return report.RESULT


def connect():
    if report.API == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            model=report.MODEL, base_url=report.URL, api_key=report.KEY, max_retries=0, max_tokens=400
        )
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=report.MODEL,
        base_url=report.URL + "/v1",
        api_key=report.KEY,
        max_retries=0,
        use_responses_api=report.API == "responses",
    )


report.version(version("langchain-anthropic" if report.API == "messages" else "langchain-openai"))
model = connect()
messages = [SystemMessage(report.SYSTEM), HumanMessage(report.FIRST)]
first = model.invoke(messages)
report.turn(first.text)
second = None
for piece in model.stream([*messages, first, HumanMessage(report.SECOND)]):
    second = piece if second is None else second + piece
report.turn(second.text)
messages = [HumanMessage(report.ASK_FOR_TOOL)]
forced = model.bind_tools([weather], tool_choice="weather").invoke(messages)
for call in forced.tool_calls:
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    messages += [forced, result]
    break
report.turn(model.bind_tools([weather]).invoke(messages).text)
