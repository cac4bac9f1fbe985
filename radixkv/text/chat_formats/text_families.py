# SPDX-License-Identifier: Apache-2.0
"""Families whose arguments are literals, or JSON after the function's name."""

from __future__ import annotations

from dataclasses import replace

from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.format_parser import Section
from radixkv.text.chat_formats.literals import PYTHON, gemma_literals
from radixkv.text.chat_formats.text_forms import (
    FUNCTION_JSON,
    LLAMA_JSON,
    PREAMBLE,
    PYTHON_LIST,
    TOOL_CALL_JSON,
)

# ---------------------------------------------------------------------- literals

LFM2 = ChatFormat(
    "lfm2",
    "LFM2 and LFM2.5",
    signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
    tokens=("<|tool_call_start|>",),
    forms=(
        replace(
            PYTHON_LIST,
            opens=("<|tool_call_start|>",),
            begin="<|tool_call_start|>[",
            end="]<|tool_call_end|>",
            reads="<|tool_call_start|>? [? NAME",
            closes=("]", "<|tool_call_end|>"),
        ),
        replace(TOOL_CALL_JSON, opens=("<|tool_call_start|>",), closes=("<|tool_call_end|>",)),
    ),
    preamble=PREAMBLE,
)
MINICPM3 = ChatFormat(
    "minicpm3",
    "MiniCPM 3",
    signs=(("<|thought_start|>", "<|tool_call_start|>"),),
    tokens=("<|thought_start|>",),
    reasoning=Section(("<|thought_start|>",), ("<|thought_end|>",)),
    forms=(
        CallForm(
            "NAME",
            PYTHON,
            "",
            ("<|tool_call_start|>",),
            "<|tool_call_start|>\n```python\n",
            "\n",
            "\n```\n<|tool_call_end|>",
            reads="<|tool_call_start|>? ```python? ```? NAME",
            reads_next="NAME",
            closes=("```", "<|tool_call_end|>"),
        ),
    ),
    preamble=PREAMBLE,
)
OLMO3 = ChatFormat(
    "olmo3",
    "Olmo 3",
    signs=(("<function_calls>",),),
    tokens=("<function_calls>",),
    forms=(
        CallForm(
            "NAME",
            PYTHON,
            "",
            ("<function_calls>",),
            "<function_calls>",
            "\n",
            "</function_calls>",
            reads="<function_calls>? NAME",
            closes=("</function_calls>",),
        ),
    ),
    preamble=PREAMBLE,
)
_PYTHON_START = replace(
    PYTHON_LIST,
    opens=("<|python_start|>",),
    begin="<|python_start|>[",
    end="]<|python_end|>",
    reads="<|python_start|>? [ NAME",
    closes=("]", "<|python_end|>"),
)
PYTHONIC = ChatFormat(
    "pythonic",
    "Llama 4, ToolACE, Llama 3.2 with a pythonic template",
    signs=(("<|python_start|>",), ("<|header_start|>",), ("func_name1(params_name1",)),
    tokens=("<|python_start|>",),
    forms=(PYTHON_LIST, _PYTHON_START, LLAMA_JSON),
    preamble=PREAMBLE,
)
_TOOL_CODE = CallForm(
    "NAME",
    PYTHON,
    "",
    (),
    "```tool_code\n",
    "\n",
    "\n```",
    reads="```tool_code? ```python? ```py? ```? [? NAME",
    reads_next="NAME",
    separators=(",",),
    closes=("]", "```"),
    bare=("```tool_code", "```python", "```py"),
)
GEMMA = ChatFormat(
    "gemma",
    "Gemma 2 and 3",
    signs=(("<start_of_turn>",),),
    tokens=("<start_of_turn>",),
    forms=(PYTHON_LIST, replace(_TOOL_CODE, opens=("```tool_code",)), TOOL_CALL_JSON),
    preamble=PREAMBLE,
)
FUNCTION_GEMMA = ChatFormat(
    "functiongemma",
    "FunctionGemma",
    signs=(("<start_function_call>",),),
    tokens=("<start_function_call>",),
    forms=(
        CallForm(
            "<start_function_call>call:NAME",
            gemma_literals("<escape>"),
            "<end_function_call>",
            ("<start_function_call>",),
            between="",
        ),
    ),
    preamble=PREAMBLE,
)
GEMMA4 = ChatFormat(
    "gemma4",
    "Gemma 4",
    signs=(("<|tool_call>",),),
    tokens=("<|tool_call>",),
    reasoning=Section(("<|channel>thought", "<|channel>"), ("<channel|>",)),
    forms=(
        CallForm(
            "<|tool_call>call:NAME", gemma_literals('<|"|>'), "<tool_call|>", ("<|tool_call>",), between=""
        ),
    ),
    calls_end_reasoning=True,
    preamble=PREAMBLE,
)

# ---------------------------------------------------------------------- JSON after a head

FUNCTIONARY31 = ChatFormat(
    "functionary-v3.1",
    "Functionary v3.1",
    signs=(("<function=",), ("start_tag => `<function`",)),
    forms=(FUNCTION_JSON,),
    preamble=PREAMBLE,
)
FUNCTIONARY32 = ChatFormat(
    "functionary-v3.2",
    "Functionary v3.2",
    signs=((">>>all",), ("'>>>'",), ('">>>"',), ("content>>>",)),
    spoken=Section((">>>all\n",)),
    frames_content=True,
    forms=(CallForm(">>>NAME\n", JsonArguments(), "", (">>>",), between="", reads=">>>NAME"),),
    preamble=PREAMBLE,
)
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
KIMI2 = ChatFormat(
    "kimi-k2",
    "Kimi K2",
    signs=((_SECTION[0],),),
    tokens=(_SECTION[0],),
    forms=(
        CallForm(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
            JsonArguments(),
            "<|tool_call_end|>",
            (*_SECTION, "<|tool_call_begin|>"),
            _SECTION[0],
            "",
            "<|tool_calls_section_end|>",
            reads=f"{_SECTION[0]}? {_SECTION[1]}? <|tool_call_begin|> NUMBERED <|tool_call_argument_begin|>",
            closes=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
            first_index=None,
        ),
    ),
    calls_end_reasoning=True,
    preamble=PREAMBLE,
    numbers_ids=True,
)
_SOLAR = ("<|tool_calls|>", "<|begin|>assistant<|tool_calls|>")
SOLAR = ChatFormat(
    "solar",
    "Solar Open",
    signs=(("<|tool_call:begin|>",),),
    tokens=("<|tool_call:begin|>",),
    reasoning=Section(("<|think|>", "<|begin|>assistant<|think|>"), ("<|end|>",)),
    spoken=Section(("<|content|>", "<|begin|>assistant<|content|>"), ("<|end|>",)),
    forms=(
        CallForm(
            "<|tool_call:begin|>IDENT<|tool_call:name|>NAME<|tool_call:args|>",
            JsonArguments(),
            "<|tool_call:end|>",
            _SOLAR,
            _SOLAR[0],
            "",
            "<|calls|>",
            reads="<|begin|>assistant? <|tool_calls|>? <|tool_call:begin|> IDENT? <|tool_call:name|> NAME "
            "<|tool_call:args|>",
            closes=("<|calls|>",),
            id_pattern="[a-z0-9]{9}",
        ),
    ),
    dropped=("<|end|>",),
    frames_content=True,
    after_reasoning="<|begin|>assistant",
    preamble=PREAMBLE,
)
_DS = {word: f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}
_DS_FORM = CallForm(
    f"{_DS['call▁begin']}function{_DS['sep']}NAME\n```json\n",
    JsonArguments(),
    f"\n```{_DS['call▁end']}",
    (_DS["calls▁begin"], _DS["call▁begin"]),
    _DS["calls▁begin"],
    "\n",
    _DS["calls▁end"],
    reads=f"{_DS['calls▁begin']}? {_DS['call▁begin']}? function{_DS['sep']}? NAME {_DS['sep']}? ```json?",
    reads_tail=f"```? {_DS['call▁end']}?",
    closes=(_DS["calls▁end"],),
)
DEEPSEEK = ChatFormat(
    "deepseek",
    "DeepSeek V3 and R1",
    signs=((_DS["calls▁begin"], "```json"),),
    tokens=(_DS["calls▁begin"],),
    forms=(_DS_FORM,),
    preamble=PREAMBLE,
)
DEEPSEEK31 = replace(
    DEEPSEEK,
    name="deepseek-v3.1",
    families="DeepSeek V3.1",
    signs=((_DS["calls▁begin"],), (_DS["sep"],)),
    tokens=(),
    forms=(replace(_DS_FORM, head=f"{_DS['call▁begin']}NAME{_DS['sep']}", tail=_DS["call▁end"], between=""),),
)
_MESSAGE = "<|message|>"


def _channels(*headers: str) -> tuple[str, ...]:
    """Marks of Harmony: each header at the beginning of an answer, and of a further message."""
    return tuple(start + header for header in headers for start in ("", "<|start|>assistant"))


HARMONY = ChatFormat(
    "harmony",
    "gpt-oss",
    signs=(("<|channel|>",),),
    tokens=("<|channel|>",),
    reasoning=Section(_channels(f"<|channel|>analysis{_MESSAGE}"), ("<|end|>",)),
    spoken=Section(
        _channels(
            f"<|channel|>final{_MESSAGE}",
            f"<|channel|>final <|constrain|>json{_MESSAGE}",
            f"<|channel|>final json{_MESSAGE}",
            f"<|channel|>commentary{_MESSAGE}",
        ),
        ("<|end|>", "<|return|>"),
    ),
    forms=(
        CallForm(
            f"<|channel|>commentary to=functions.NAME <|constrain|>json{_MESSAGE}",
            JsonArguments(),
            "<|call|>",
            _channels(
                "<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.", " to=functions."
            ),
            between="<|start|>assistant",
            reads="<|start|>assistant? <|channel|>commentary? <|channel|>analysis? to=functions.NAME "
            f"<|channel|>WORD? <|constrain|>? json? code? {_MESSAGE}",
            reads_tail="<|call|>? <|end|>?",
        ),
    ),
    frames_content=True,
    after_reasoning="<|start|>assistant",
    preamble=PREAMBLE,
)

TEXT_FAMILIES = (
    *(HARMONY, DEEPSEEK, DEEPSEEK31, KIMI2, GEMMA4, FUNCTION_GEMMA, FUNCTIONARY31, FUNCTIONARY32),
    *(MINICPM3, LFM2, OLMO3, SOLAR, PYTHONIC),
)
