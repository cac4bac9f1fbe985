# SPDX-License-Identifier: Apache-2.0
"""Families whose arguments are text between tags: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2 and others."""

from __future__ import annotations

from dataclasses import replace

from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.format_parser import Section
from radixkv.text.chat_formats.tagged_arguments import ElementArguments, TaggedArguments
from radixkv.text.chat_formats.text_forms import ARG_PAIRS, FUNCTION_TAGS, PREAMBLE, TOOL_CALL_JSON

QWEN_CODER = ChatFormat(
    "qwen3-coder",
    "Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3, Step 3.5, MiMo-V2",
    signs=(("<function=", "<parameter="),),
    forms=(FUNCTION_TAGS, TOOL_CALL_JSON),
    preamble=PREAMBLE,
)
_SEED = replace(
    FUNCTION_TAGS,
    head="<seed:tool_call>\n<function=NAME>\n",
    arguments=TaggedArguments("<parameter=KEY>", "</parameter>\n", "", constants=("True", "False", "None")),
    tail="</function>\n</seed:tool_call>",
    opens=("<seed:tool_call>", "<function="),
    reads="<seed:tool_call>? <function=NAME>",
    closes=("</seed:tool_call>",),
)
SEED = ChatFormat(
    "seed",
    "Seed-OSS",
    signs=(("<seed:tool_call>",),),
    tokens=("<seed:tool_call>",),
    reasoning=Section(("<seed:think>",), ("</seed:think>",)),
    forms=(_SEED,),
    preamble=PREAMBLE,
)
GLM = ChatFormat(
    "glm",
    "GLM 4.5 to 5, Ling 3, Laguna, Spark 2.5",
    signs=(("<arg_key>",),),
    tokens=("<arg_key>",),
    forms=(ARG_PAIRS, TOOL_CALL_JSON),
    preamble=PREAMBLE,
)


def _hy_form(suffix: str) -> CallForm:
    """Calls whose marks all have a suffix in their names."""
    return CallForm(
        f"<tool_call{suffix}>NAME<tool_sep{suffix}>\n",
        TaggedArguments(
            f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>", f"</arg_value{suffix}>\n", ""
        ),
        f"</tool_call{suffix}>",
        (f"<tool_calls{suffix}>", f"<tool_call{suffix}>"),
        f"<tool_calls{suffix}>\n",
        "\n",
        f"\n</tool_calls{suffix}>",
        reads=f"<tool_calls{suffix}>? <tool_call{suffix}> NAME <tool_sep{suffix}>?",
        closes=(f"</tool_calls{suffix}>",),
    )


HY3 = ChatFormat(
    "hy3",
    "Hunyuan 3 (Hy3)",
    signs=(("<arg_key:opensource>",), ("HYTK",), ("<tool_sep>", "<arg_key>")),
    tokens=("<arg_key:opensource>",),
    reasoning=Section(("<think:opensource>", "<think>"), ("</think:opensource>", "</think>")),
    forms=(_hy_form(":opensource"), _hy_form("")),
    preamble=PREAMBLE,
)
MINIMAX2 = ChatFormat(
    "minimax-m2",
    "MiniMax-M2",
    signs=(("<minimax:tool_call>",),),
    tokens=("<minimax:tool_call>",),
    forms=(
        CallForm(
            '<invoke name="NAME">\n',
            TaggedArguments('<parameter name="KEY">', "</parameter>\n", ""),
            "</invoke>",
            ("<minimax:tool_call>",),
            "<minimax:tool_call>\n",
            "\n",
            "\n</minimax:tool_call>",
            reads='<minimax:tool_call>? <invoke name="NAME">',
            closes=("</minimax:tool_call>",),
        ),
    ),
    preamble=PREAMBLE,
)
_M3 = "]<]minimax[>["
MINIMAX3 = ChatFormat(
    "minimax-m3",
    "MiniMax-M3",
    signs=((_M3,),),
    tokens=(_M3,),
    reasoning=Section(("<mm:think>",), ("</mm:think>",)),
    forms=(
        CallForm(
            f'{_M3}<invoke name="NAME">',
            ElementArguments(_M3),
            f"{_M3}</invoke>",
            (f"{_M3}<tool_call>",),
            f"{_M3}<tool_call>\n",
            "\n",
            f"\n{_M3}</tool_call>",
            reads=f'{_M3}<tool_call>? {_M3}<invoke name="NAME">',
            closes=(f"{_M3}</tool_call>",),
        ),
    ),
    preamble=PREAMBLE,
)
_DSML = "｜DSML｜"
_DSML_KINDS = dict.fromkeys(("boolean", "number", "object", "array", "null"), "false") | {"string": "true"}
_DSML_FORM = CallForm(
    f'<{_DSML}invoke name="NAME">\n',
    TaggedArguments(
        f'<{_DSML}parameter name="KEY" string="KIND">', f"</{_DSML}parameter>\n", "", kinds=_DSML_KINDS
    ),
    f"</{_DSML}invoke>",
    (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
    f"<{_DSML}function_calls>\n",
    "\n",
    f"\n</{_DSML}function_calls>",
    reads=f'<{_DSML}function_calls>? <{_DSML}tool_calls>? <{_DSML}invoke name="NAME">',
    closes=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
)
DEEPSEEK_DSML = ChatFormat(
    "deepseek-dsml",
    "DeepSeek V3.2",
    signs=((_DSML,),),
    tokens=(_DSML,),
    forms=(_DSML_FORM,),
    preamble=PREAMBLE,
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_DSML,
    name="deepseek-v4",
    families="DeepSeek V4",
    signs=((f"{_DSML}tool_calls",),),
    tokens=(),
    forms=(replace(_DSML_FORM, begin=f"<{_DSML}tool_calls>\n", end=f"\n</{_DSML}tool_calls>"),),
)
_STEP = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>")
STEP3 = ChatFormat(
    "step3",
    "Step 3",
    signs=(("steptml",),),
    tokens=(_STEP[0],),
    forms=(
        CallForm(
            f'{_STEP[2]}function<｜tool_sep｜><steptml:invoke name="NAME">',
            TaggedArguments('<steptml:parameter name="KEY">', "</steptml:parameter>", ""),
            f"</steptml:invoke>{_STEP[3]}",
            _STEP[:1],
            _STEP[0],
            "",
            _STEP[1],
            reads=f'{_STEP[0]}? {_STEP[2]}? function<｜tool_sep｜>? <steptml:invoke name="NAME">',
            reads_tail=f"</steptml:invoke> {_STEP[3]}?",
            closes=_STEP[1:2],
        ),
    ),
    preamble=PREAMBLE,
)
_MUSE = ("<|eom|>", "<|eot|>")
MUSE = ChatFormat(
    "muse",
    "Muse",
    signs=(("<atem:function_calls>",),),
    tokens=("<atem:function_calls>",),
    reasoning=Section((" to=self<|message|>", "<|start|>assistant to=self<|message|>"), _MUSE),
    spoken=Section((" to=user<|message|>", "<|start|>assistant to=user<|message|>"), _MUSE),
    forms=(
        CallForm(
            ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
            TaggedArguments('<atem:parameter name="KEY">', "</atem:parameter>\n", ""),
            "</atem:invoke>\n</atem:function_calls>",
            (" to=", "<|start|>assistant to=", "<atem:function_calls>"),
            between="<|eom|><|start|>assistant",
            reads="<|start|>assistant? to=? WORD<|message|>? <atem:function_calls>? "
            '<atem:invoke name="NAME">',
            reads_tail="</atem:invoke>",
            closes=("</atem:function_calls>",),
        ),
    ),
    dropped=_MUSE,
    frames_content=True,
    after_reasoning="<|start|>assistant",
    preamble=PREAMBLE,
)
MINICPM5 = ChatFormat(
    "minicpm5",
    "MiniCPM 5",
    signs=(("<function name=", "<param name="),),
    forms=(
        CallForm(
            '<function name="NAME">',
            TaggedArguments(
                '<param name="KEY">', "</param>", "", is_cdata=True, constants=("True", "False", "None")
            ),
            "</function>",
            ("<function name=",),
        ),
    ),
    preamble=PREAMBLE,
)
_SEP = "<|sep|>"
_K3_KINDS = {kind: kind for kind in ("string", "number", "boolean", "object", "array", "null")}
KIMI3 = ChatFormat(
    "kimi-k3",
    "Kimi K3",
    signs=(("<|open|>", "<|close|>"),),
    tokens=("<|open|>",),
    reasoning=Section((f"<|open|>think{_SEP}",), (f"<|close|>think{_SEP}",)),
    spoken=Section((f"<|open|>response{_SEP}",), (f"<|close|>response{_SEP}",)),
    forms=(
        CallForm(
            f'<|open|>call tool="NAME" index="INDEX"{_SEP}',
            TaggedArguments(
                f'<|open|>argument key="KEY" type="KIND"{_SEP}',
                f"<|close|>argument{_SEP}",
                "",
                kinds=_K3_KINDS,
            ),
            f"<|close|>call{_SEP}",
            (f"<|open|>tools{_SEP}",),
            f"<|open|>response{_SEP}<|close|>response{_SEP}<|open|>tools{_SEP}",
            "",
            f"<|close|>tools{_SEP}",
            reads=f'<|open|>tools{_SEP}? <|open|>call tool="NAME" index="INDEX"{_SEP}',
            closes=(f"<|close|>tools{_SEP}",),
        ),
    ),
    dropped=(f"<|close|>message{_SEP}", "<|end_of_msg|>"),
    frames_content=True,
    preamble=PREAMBLE,
)

TAGGED_FAMILIES = (
    *(
        DEEPSEEK_V4,
        DEEPSEEK_DSML,
        STEP3,
        KIMI3,
        MINIMAX3,
        MINIMAX2,
        MUSE,
        SEED,
        HY3,
        GLM,
        MINICPM5,
        QWEN_CODER,
    ),
)
