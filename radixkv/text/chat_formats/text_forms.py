# SPDX-License-Identifier: Apache-2.0
"""Forms of calls that several families write, and read beside their own."""

from __future__ import annotations

from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.json_calls import JsonCalls
from radixkv.text.chat_formats.literals import PYTHON
from radixkv.text.chat_formats.tagged_arguments import TaggedArguments

#: Before the arguments of a call that is a JSON object.
NAME_JSON = '{"name": "NAME", "arguments": '

PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures as JSON:\n<tools>\nTOOLS\n</tools>\n\n"
    "To call functions, answer with nothing but the calls, in exactly this form:\nEXAMPLE"
)

#: Hermes's.
TOOL_CALL_JSON = JsonCalls(
    f"<tool_call>\n{NAME_JSON}", "}\n</tool_call>", ("<tool_call>",), closes=("</tool_call>",)
)
#: Qwen3-Coder's.
FUNCTION_TAGS = CallForm(
    "<tool_call>\n<function=NAME>\n",
    TaggedArguments("<parameter=KEY>\n", "\n</parameter>\n", "", padded=True),
    "</function>\n</tool_call>",
    ("<tool_call>", "<function="),
    reads="<tool_call>? <function=NAME>",
    reads_tail="</function>",
    closes=("</tool_call>",),
)
#: GLM's.
ARG_PAIRS = CallForm(
    "<tool_call>NAME\n",
    TaggedArguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "</tool_call>",
    ("<tool_call>",),
    is_vague=True,
)
#: Functionary's and Llama's.
FUNCTION_JSON = CallForm("<function=NAME>", JsonArguments(), "</function>", ("<function=",), between="")
#: A list of calls as Python writes them, with nothing before it.
PYTHON_LIST = CallForm(
    "NAME",
    PYTHON,
    "",
    (),
    "[",
    ", ",
    "]",
    reads="[ NAME",
    reads_next="NAME",
    separators=(",",),
    closes=("]",),
    bare=("[",),
)
#: Llama's.
LLAMA_JSON = JsonCalls(
    '{"name": "NAME", "parameters": ',
    "}",
    ("<|python_tag|>", "<|python_start|>"),
    between="; ",
    closes=("<|python_end|>",),
    bare=("{", "```json", "["),
)
