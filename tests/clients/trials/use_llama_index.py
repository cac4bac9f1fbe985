# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex (OpenAILike) over chat completions."""

from importlib.metadata import version

import report
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=report.MODEL,
    api_base=report.URL + "/v1",
    api_key=report.KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=100_000,
    max_retries=0,
)


def weather(city: str, days: int) -> str:
    """The weather of a city."""
    report.called({"city": city, "days": days})
    return report.RESULT


report.version(version("llama-index-core"))
messages = [ChatMessage(role="system", content=report.SYSTEM), ChatMessage(role="user", content=report.FIRST)]
first = llm.chat(messages).message
report.turn(first.content)
pieces = list(llm.stream_chat([*messages, first, ChatMessage(role="user", content=report.SECOND)]))
report.turn(pieces[-1].message.content)
tool = FunctionTool.from_defaults(weather)
answer = llm.predict_and_call([tool], user_msg=report.ASK_FOR_TOOL, tool_required=True)
if report.RESULT not in str(answer):
    raise SystemExit(f"the tool's result is missing: {answer}")
