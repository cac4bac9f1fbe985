# SPDX-License-Identifier: Apache-2.0
"""openai-agents over both of OpenAI's APIs."""

import asyncio
from importlib.metadata import version

import openai
import report
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: its name.
        days: how many days to look ahead.
    """
    report.called({"city": city, "days": days})
    return report.RESULT


async def main() -> None:
    report.version(version("openai-agents"))
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=report.URL + "/v1", api_key=report.KEY, max_retries=0)
    model = KINDS[report.API](report.MODEL, client)
    agent = Agent(name="trial", instructions=report.SYSTEM, model=model)
    first = await Runner.run(agent, report.FIRST)
    report.turn(first.final_output)
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": report.SECOND}])
    report.turn(second.final_output)
    forced = Agent(
        name="tools", model=model, tools=[weather], model_settings=ModelSettings(tool_choice="required")
    )
    answer = await Runner.run(forced, report.ASK_FOR_TOOL)
    report.turn(answer.final_output)


asyncio.run(main())
