# SPDX-License-Identifier: Apache-2.0
"""Families whose calls are JSON objects: Hermes and Qwen, Mistral, Llama 3, Granite, Command, and others."""

from __future__ import annotations

from dataclasses import replace

from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.format_parser import Section
from radixkv.text.chat_formats.json_calls import JsonCalls
from radixkv.text.chat_formats.tagged_arguments import TaggedArguments
from radixkv.text.chat_formats.text_forms import (
    ARG_PAIRS,
    FUNCTION_JSON,
    FUNCTION_TAGS,
    LLAMA_JSON,
    NAME_JSON,
    PREAMBLE,
    PYTHON_LIST,
    TOOL_CALL_JSON,
)


def _list(opens: str, closes: str = "", *more: str, between: str = ", ") -> JsonCalls:
    """A list of calls between two marks.

    Args:
        more: further marks that open one.
    """
    marks = (closes,) if closes else ()
    return JsonCalls(NAME_JSON, "}", (opens, *more), f"{opens}[", between, f"]{closes}", marks)


HERMES = ChatFormat(
    "hermes",
    "Hermes 2 and 3, Qwen 2.5 and 3, QwQ, Granite 4, MiMo-VL, Bielik, Reka Edge, EXAONE 4 and many others",
    signs=(("<tool_call>",),),
    forms=(TOOL_CALL_JSON, FUNCTION_TAGS),
    preamble=PREAMBLE,
)
ERNIE = replace(
    HERMES,
    name="ernie",
    families="ERNIE 4.5",
    signs=(("<tool_call>", "<response>\n"), ("<tool_call>", "<response>\\n")),
    spoken=Section(("<response>",), ("</response>",)),
)
SMOLLM3 = replace(
    HERMES,
    name="smollm3",
    families="SmolLM3",
    signs=(("xml_tools",), ("named SmolLM", "<think>")),
    tools_option="xml_tools",
)
SMOLLM2 = ChatFormat(
    "smollm2",
    "SmolLM2",
    signs=(("named SmolLM", "trained by Hugging Face"),),
    forms=(_list("<tool_call>", "</tool_call>"),),
    # As published with SmolLM2-1.7B-Instruct.
    preamble=(
        "You are an expert in composing functions. You are given a question and a set of possible "
        "functions. \nBased on the question, you will need to make one or more function/tool calls to "
        "achieve the purpose. \nIf none of the functions can be used, point it out and refuse to answer. \n"
        "If the given question lacks the parameters required by the function, also point it out.\n\n"
        "You have access to the following tools:\n<tools>TOOLS</tools>\n\n"
        "The output MUST strictly adhere to the following format, and NO other text MUST be included.\n"
        "The example format is as follows. Please make sure the parameter type is correct. If no function "
        "call is needed, please make the tool calls an empty list '[]'.\n<tool_call>[\n"
        '{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},\n'
        "... (more tool calls as required)\n]</tool_call>"
    ),
)
LONGCAT = ChatFormat(
    "longcat",
    "LongCat-Flash",
    signs=(("<longcat_tool_call>",),),
    tokens=("<longcat_tool_call>",),
    reasoning=Section(("<longcat_think>", "<think>"), ("</longcat_think>", "</think>")),
    forms=(
        JsonCalls(
            f"<longcat_tool_call>\n{NAME_JSON}",
            "}\n</longcat_tool_call>",
            ("<longcat_tool_call>",),
            closes=("</longcat_tool_call>",),
        ),
        replace(
            ARG_PAIRS,
            head="<longcat_tool_call>NAME\n",
            arguments=TaggedArguments(
                "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n", ""
            ),
            tail="</longcat_tool_call>",
            opens=("<longcat_tool_call>",),
        ),
    ),
    preamble=PREAMBLE,
)

LLAMA3 = ChatFormat(
    "llama3",
    "Llama 3.1, 3.2 and 3.3",
    signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    tokens=("<|python_tag|>",),
    forms=(LLAMA_JSON, PYTHON_LIST, FUNCTION_JSON),
    preamble=PREAMBLE,
)
XLAM = ChatFormat(
    "xlam",
    "xLAM 2",
    signs=(('"tool_call_name"',), ("xLAM",)),
    forms=(
        JsonCalls(
            NAME_JSON,
            "}",
            ("<tool_call>", "[TOOL_CALLS]"),
            "[",
            ", ",
            "]",
            ("</tool_call>", "```"),
            bare=("[", "{", "```json", "```"),
        ),
    ),
    preamble=PREAMBLE,
)

_MISTRAL_LIST = JsonCalls(
    NAME_JSON, "}", ("[TOOL_CALLS]",), "[TOOL_CALLS] [", ", ", "]", arguments_keys=frozenset({"arguments"})
)
MISTRAL_ARGS = ChatFormat(
    "mistral-args",
    "Mistral models from tokenizer version 11 on: Mistral Small 3.2, Magistral, Devstral, Ministral 3",
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    tokens=("[ARGS]",),
    reasoning=Section(("[THINK]", "<think>"), ("[/THINK]", "</think>")),
    forms=(
        CallForm(
            "[TOOL_CALLS]NAME[ARGS]",
            JsonArguments(),
            "",
            ("[TOOL_CALLS]",),
            between="",
            reads="[TOOL_CALLS]? NAME [CALL_ID]IDENT? [ARGS]",
        ),
        _MISTRAL_LIST,
    ),
    preamble=PREAMBLE,
    call_id_length=9,
)
MISTRAL = ChatFormat(
    "mistral",
    "Mistral models up to tokenizer version 7: Mistral 7B v0.3, Nemo, Small 2501",
    signs=(("[TOOL_CALLS]",),),
    tokens=("[TOOL_CALLS]",),
    reasoning=MISTRAL_ARGS.reasoning,
    forms=tuple(reversed(MISTRAL_ARGS.forms)),
    preamble=PREAMBLE,
    call_id_length=9,
)

GRANITE = ChatFormat(
    "granite",
    "Granite 3.0 to 3.3",
    signs=(("<|start_of_role|>", "<|tool_call|>"), ("<|tool_call|>",)),
    tokens=("<|tool_call|>",),
    reasoning=Section(
        ("<think>", "Here is my thought process:", "Here's my thought process:"), ("</think>",)
    ),
    spoken=Section(("<response>", "Here is my response:", "Here's my response:"), ("</response>",)),
    forms=(_list("<|tool_call|>", "", "<tool_call>"), TOOL_CALL_JSON),
    preamble=PREAMBLE,
)
PHI4 = ChatFormat(
    "phi4",
    "Phi-4-mini",
    signs=(("<|/tool_call|>",), ("<|tool|>", "<|/tool|>"), ("<|tool|>", "functools[")),
    tokens=("<|/tool_call|>",),
    forms=(_list("<|tool_call|>", "<|/tool_call|>", "functools"),),
    preamble=PREAMBLE,
)
FIREFUNCTION = ChatFormat(
    "firefunction",
    "Firefunction v2",
    signs=(("functools[",),),
    forms=(replace(_list("functools"), begin=" functools["),),
    preamble=PREAMBLE,
)
NEMOTRON2 = ChatFormat(
    "nemotron-v2",
    "Nemotron Nano v2, Llama-Nemotron",
    signs=(("<TOOLCALL>",), ("<AVAILABLE_TOOLS>",)),
    tokens=("<TOOLCALL>",),
    forms=(_list("<TOOLCALL>", "</TOOLCALL>"),),
    preamble=PREAMBLE,
)

GRANITE20 = ChatFormat(
    "granite-20b",
    "Granite 20B function calling",
    signs=(("<function_call>", "<|function_call_library|>"), ("<function_call> {",)),
    forms=(JsonCalls(f"<function_call> {NAME_JSON}", "}", ("<function_call>",), between=""),),
    preamble=PREAMBLE,
)
CLOVA = ChatFormat(
    "hyperclova",
    "HyperCLOVA X SEED",
    signs=(("tool/function_call",),),
    reasoning=Section(
        ("/think\n", "<|im_start|>assistant/think\n"), ("<|im_end|>\n<|im_start|>assistant", "<|im_end|>")
    ),
    forms=(
        _list(
            " -> tool/function_call\n",
            "",
            "-> tool/function_call",
            "<|im_start|>assistant -> tool/function_call",
        ),
    ),
    dropped=("<|im_end|>", "<|stop|>", "<|endofturn|>"),
    preamble=PREAMBLE,
)

_TOOL_CALLS = _list("<tool_calls>", "</tool_calls>")
APRIEL = ChatFormat(
    "apriel",
    "Apriel 1.5 and 1.6",
    signs=(("[BEGIN FINAL RESPONSE]",),),
    tokens=("[BEGIN FINAL RESPONSE]",),
    reasoning=Section(
        ("Here are my reasoning steps:", "<thinking>", "<think>"),
        ("[BEGIN FINAL RESPONSE]", "</thinking>", "</think>"),
    ),
    forms=(_TOOL_CALLS,),
    dropped=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    calls_end_reasoning=True,
    preamble=PREAMBLE,
)
MINIMAX1 = ChatFormat(
    "minimax-m1",
    "MiniMax-M1",
    signs=(("<beginning_of_sentence>", "<tool_calls>"),),
    forms=(replace(_TOOL_CALLS, begin="<tool_calls>\n", between="\n", end="\n</tool_calls>"),),
    preamble=PREAMBLE,
)
HUNYUAN = ChatFormat(
    "hunyuan",
    "Hunyuan A13B and the smaller ones, Jamba",
    signs=(("<tool_calls>",), ("<answer>", "</answer>"), ("<|hy_place",), ("<|extra_0|>", "<|startoftext|>")),
    tokens=("<tool_calls>",),
    spoken=Section(("<answer>",), ("</answer>",)),
    forms=(
        _TOOL_CALLS,
        CallForm(
            "<tool_call>NAME\n```json\n",
            JsonArguments(),
            "\n```</tool_call>",
            ("<tool_calls>", "<tool_call>"),
            "<tool_calls>",
            "\n",
            "</tool_calls>",
            reads="<tool_calls>? <tool_call> function<tool_sep>? NAME <tool_sep>? ```json?",
            reads_tail="```? </tool_call>",
            closes=("</tool_calls>",),
        ),
        TOOL_CALL_JSON,
    ),
    preamble=PREAMBLE,
)

_COMMAND_CALL = '{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": '
COMMAND = ChatFormat(
    "command",
    "Command R7B, Command A, Command A Reasoning",
    signs=(("<|START_ACTION|>",),),
    tokens=("<|START_ACTION|>",),
    reasoning=Section(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    spoken=Section(("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")),
    frames_content=True,
    forms=(
        JsonCalls(
            _COMMAND_CALL,
            "}",
            ("<|START_ACTION|>",),
            "<|START_ACTION|>[\n    ",
            ",\n    ",
            "\n]<|END_ACTION|>",
            ("<|END_ACTION|>",),
            id_key=None,
        ),
    ),
    preamble=PREAMBLE,
)
_ACTION = tuple(f"Action:{blank}```json" for blank in ("", " ", "\n"))
COMMAND_R = ChatFormat(
    "command-r",
    "Command R and R+ (2024)",
    signs=(("Action:", "tool_name"),),
    forms=(
        JsonCalls(
            '    {\n        "tool_name": "NAME",\n        "parameters": ',
            "\n    }",
            _ACTION,
            "Action: ```json\n[\n",
            ",\n",
            "\n]```",
            ("```",),
            id_key=None,
        ),
    ),
    preamble=PREAMBLE,
)
APERTUS = ChatFormat(
    "apertus",
    "Apertus",
    signs=(("<|tools_prefix|>",),),
    tokens=("<|tools_prefix|>",),
    reasoning=Section(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    forms=(
        JsonCalls(
            '{"NAME": ',
            "}",
            ("<|tools_prefix|>",),
            "<|tools_prefix|>[",
            ", ",
            "]<|tools_suffix|>",
            ("<|tools_suffix|>",),
            is_named=True,
        ),
    ),
    dropped=("<|inner_suffix|>",),
    calls_end_reasoning=True,
    preamble=PREAMBLE,
)
_PLUGIN = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
INTERNLM = ChatFormat(
    "internlm",
    "InternLM 2.5 and 3, Intern-S1",
    signs=(("<|action_start|>",), ("<|plugin|>",)),
    tokens=("<|action_start|>",),
    forms=(
        JsonCalls(
            '{"name": "NAME", "parameters": ',
            "}",
            _PLUGIN,
            "<|action_start|><|plugin|>\n",
            "\n",
            "<|action_end|>",
            ("<|action_end|>",),
        ),
    ),
    preamble=PREAMBLE,
)
_GIGA = ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>")
GIGACHAT = ChatFormat(
    "gigachat",
    "GigaChat 3.1",
    signs=(("<|function_call|>",),),
    tokens=("<|function_call|>",),
    forms=(JsonCalls(f"<|function_call|>{NAME_JSON}", "}", _GIGA, between="\n"),),
    dropped=("<|message_sep|>",),
    preamble=PREAMBLE,
)
GIGACHAT3 = replace(
    GIGACHAT,
    name="gigachat3",
    families="GigaChat 3",
    signs=(("function call", "<|role_sep|>"),),
    tokens=(),
    forms=(JsonCalls(f"{_GIGA[1]}\n{NAME_JSON}", "}", _GIGA, between="\n"),),
)
PANGU = ChatFormat(
    "pangu",
    "openPangu",
    signs=(("[unused11]", "[unused12]"),),
    reasoning=Section(("[unused16]",), ("[unused17]",)),
    forms=(_list("[unused11]", "[unused12]"),),
    preamble=PREAMBLE,
)

JSON_FAMILIES = (
    *(
        APRIEL,
        MINIMAX1,
        COMMAND,
        COMMAND_R,
        APERTUS,
        INTERNLM,
        GIGACHAT,
        GIGACHAT3,
        PANGU,
        LONGCAT,
        NEMOTRON2,
    ),
    *(
        GRANITE20,
        CLOVA,
        PHI4,
        GRANITE,
        FIREFUNCTION,
        XLAM,
        MISTRAL_ARGS,
        MISTRAL,
        LLAMA3,
        HUNYUAN,
        SMOLLM3,
        ERNIE,
        HERMES,
    ),
    SMOLLM2,
)
