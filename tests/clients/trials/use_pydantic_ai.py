# SPDX-License-Identifier: Apache-2.0
"""pydantic-ai over both of OpenAI's APIs."""

from importlib.metadata import version

import report
from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


report.version(version("pydantic-ai-slim"))
model = KINDS[report.API](
    report.MODEL, provider=OpenAIProvider(base_url=report.URL + "/v1", api_key=report.KEY)
)
agent = Agent(model, instructions=report.SYSTEM)
first = agent.run_sync(report.FIRST)
report.turn(first.output)
second = agent.run_sync(report.SECOND, message_history=first.all_messages())
report.turn(second.output)
# An answer by a tool is forced: `tool_choice` is `required`.
forced = Agent(model, output_type=ToolOutput(Weather, name="weather")).run_sync(report.ASK_FOR_TOOL)
report.called(forced.output.model_dump())
