# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Texts that models of many families write, with a chat template of the kind and the message that each means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import family_templates as t
from family_templates import (
    CALLS,
    CHATML,
    GEMMA,
    OBJECT,
    OPENED,
    PS,
    PW,
    PYTHON,
    SAID,
    THOUGHT,
    THOUGHTS,
    S,
    W,
    objects,
    tagged,
    template,
)

#: Special tokens of the families' vocabularies.
_MARK = re.compile(
    r"<([|｜])[^<>|｜]*\1>|<\|[\w\"]+>|<\w+\|>|</?(?:seed|mm|minimax):\w+>|<(?:start|end)_function_call>|<escape>"
    r"|\[[A-Z_/]+\]|\[unused\d+\]|\]<\]minimax\[>\["
)


@dataclass(frozen=True)
class Row:
    """A text of a family's model.

    Args:
        name: family and variant.
        template: a chat template of the kind.
        text: what the model writes.
        thought, said, calls: the message that it means.
        marks: special tokens of the vocabulary, beside those that `_MARK` finds in the text.
    """

    name: str
    template: str
    text: str
    thought: str = ""
    said: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = CALLS
    marks: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Special tokens of the vocabulary."""
        return tuple(dict.fromkeys(found[0] for found in _MARK.finditer(self.text))) + self.marks


# fmt: off
ROWS = (
    Row("Qwen 3", t.QWEN, THOUGHTS + SAID + "\n" + objects("<tool_call>\n", "\n</tool_call>"), THOUGHT, SAID),
    Row("Qwen 3 without thinking", t.QWEN,
        "<think>\n\n</think>\n\n" + objects("<tool_call>\n", "\n</tool_call>")),
    Row("Qwen 2.5", t.QWEN, objects("<tool_call>", "</tool_call>", "", compact=True)),
    Row("QwQ", t.QWQ, OPENED + objects("<tool_call>\n", "\n</tool_call>"), THOUGHT),
    Row("Qwen 3 answer", t.QWEN, THOUGHTS + "Sunny.", THOUGHT, "Sunny.", ()),
    Row("Hermes 3, arguments first", t.QWEN,
        f'<tool_call>\n{{"arguments": {W}, "name": "get_weather"}}\n</tool_call>\n<tool_call>\n{{"arguments": {S}, "name": "search"}}\n</tool_call>'),
    Row("Qwen3-Coder", t.CODER, SAID + "\n\n" + t.CODER_TEXT, "", SAID),
    Row("Qwen3-Coder without the outer mark", t.CODER, t.CODER_TEXT.replace("<tool_call>\n", "", 1)),
    Row("Qwen 3.5", t.CODER, THOUGHTS + t.CODER_TEXT, THOUGHT),
    Row("Nemotron 3", template(*CHATML, call=t.FUNCTION, between="\n", opened="<think>\n"),
        OPENED + t.CODER_TEXT, THOUGHT),
    Row("MiMo-V2", t.CODER,
        tagged("<tool_call><function=NAME>", "<parameter=KEY>VALUE</parameter>", "</function></tool_call>")),
    Row("Step 3.5", template(*CHATML, call=t.FUNCTION, opened="<think>\n"),
        f"{THOUGHT}</think>\n{t.CODER_TEXT}", THOUGHT),
    Row("Seed-OSS", t.SEED, f"<seed:think>{THOUGHT}</seed:think>\n{t.SEED_TEXT}", THOUGHT),
    Row("Seed-OSS answer", t.SEED, f"<seed:think>\n{THOUGHT}\n</seed:think>Sunny.", THOUGHT, "Sunny.", ()),
    Row("GLM 4.5", t.GLM,
        f"\n<think>{THOUGHT}</think>\n{SAID}\n" + tagged("<tool_call>NAME\n", t.GLM_ITEM, "</tool_call>"),
        THOUGHT, SAID),
    Row("GLM 4.7", t.GLM,
        f"<think>{THOUGHT}</think>"
        + tagged("<tool_call>NAME", t.GLM_ITEM.replace("\n", ""), "</tool_call>").replace("\n<tool_call>", "<tool_call>"),
        THOUGHT),
    Row("Ling 3", template(*CHATML, call=t.GLM_CALL), tagged("<tool_call>NAME\n", t.GLM_ITEM, "</tool_call>")),
    Row("Laguna", template("<ROLE>\n", "</ROLE>\n", "<assistant>\n", call=t.GLM_CALL, opened="<think>"),
        f"{THOUGHT}</think>\n" + tagged("<tool_call>NAME\n", t.GLM_ITEM, "</tool_call>"), THOUGHT),
    Row("Hy3",
        template("<|hy_ROLE|>", "", "<|hy_Assistant|>", before="<tool_calls>\n", after="</tool_calls>",
            call=t.HY),
        f"<think>{THOUGHT}</think><tool_calls>\n"
        + tagged("<tool_call>NAME<tool_sep>\n", t.GLM_ITEM, "</tool_call>") + "\n</tool_calls>",
        THOUGHT),
    Row("MiniMax-M2", t.M2,
        OPENED + "<minimax:tool_call>\n"
        + tagged('<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>")
        + "\n</minimax:tool_call>",
        THOUGHT),
    Row("MiniMax-M3", t.M3, f"<mm:think>{THOUGHT}</mm:think>{SAID}{t.M3_TEXT}", THOUGHT, SAID),
    Row("DeepSeek V3.2", t.dsml_template("function_calls"),
        f"{THOUGHT}</think>{SAID}\n\n{t.dsml('function_calls')}", THOUGHT, SAID),
    Row("DeepSeek V4", t.dsml_template("tool_calls"), f"{THOUGHT}</think>\n\n{t.dsml('tool_calls')}", THOUGHT,
        marks=(t.D,)),
    Row("DeepSeek V3", t.DS3, SAID + t.DS3_TEXT + t.DS["calls▁end"], "", SAID),
    Row("DeepSeek R1", t.DS3, THOUGHTS + t.DS3_TEXT, THOUGHT),
    Row("DeepSeek V3.1", t.DS31, t.DS31_TEXT),
    Row("DeepSeek V3.1 thinking", t.DS31, f"<think>{THOUGHT}</think>{t.DS31_TEXT}", THOUGHT),
    Row("gpt-oss", t.HARMONY,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{W}<|call|>",
        THOUGHT, calls=CALLS[:1]),
    Row("gpt-oss, recipient in the role", t.HARMONY,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{W}<|call|>",
        THOUGHT, calls=CALLS[:1]),
    Row("gpt-oss answer", t.HARMONY,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>",
        THOUGHT, "Sunny.", ()),
    Row("Muse", t.MUSE,
        f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=get_weather<|message|><atem:function_calls>\n"
        + '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
        THOUGHT, calls=CALLS[:1]),
    Row("MiniCPM 5", t.MINICPM5,
        THOUGHTS + tagged('<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>"),
        THOUGHT),
    Row("Llama 3.2", t.LLAMA, f'{{"name": "get_weather", "parameters": {W}}}', calls=CALLS[:1]),
    Row("Llama 3.3, two calls", t.LLAMA, objects("", "", "; ", "parameters")),
    Row("Llama 3.1 with its tag", t.LLAMA,
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {W}}}', calls=CALLS[:1]),
    Row("Llama 3.1, function tags", t.LLAMA, f"<function=get_weather>{W}</function>", calls=CALLS[:1]),
    Row("Llama 3.2 pythonic", t.LLAMA_PYTHON, f"[get_weather({PW}), search({PS})]"),
    Row("ToolACE", t.LLAMA_PYTHON, "[get_weather(city='Paris', days=2)]", calls=CALLS[:1]),
    Row("Llama 4", t.LLAMA4, f"[get_weather({PW}), search({PS})]"),
    Row("Llama 4 between its marks", t.LLAMA4,
        f"<|python_start|>[get_weather({PW}), search({PS})]<|python_end|>"),
    Row("Llama 4 in JSON", t.LLAMA4_JSON, f'{{"name": "get_weather", "parameters": {W}}}', calls=CALLS[:1]),
    Row("Llama 4 in JSON between its marks", t.LLAMA4_JSON,
        f'<|python_start|>{{"name": "get_weather", "parameters": {W}}}<|python_end|>', calls=CALLS[:1]),
    Row("Gemma 3", t.GEMMA3, f"```tool_code\nget_weather({PW})\nsearch({PS})\n```"),
    Row("Gemma 3, a list", template(*GEMMA, role="model", before="[", after="]", between=", ", call=PYTHON),
        f"[get_weather({PW}), search({PS})]"),
    Row("LFM2", t.LFM2, f"<|tool_call_start|>[get_weather({PW}), search({PS})]<|tool_call_end|>{SAID}", "",
        SAID),
    Row("LFM2.5 thinking", t.LFM2,
        f"{THOUGHTS}<|tool_call_start|>[get_weather({PW}), search({PS})]<|tool_call_end|>", THOUGHT),
    Row("Olmo 3", t.OLMO, f"<function_calls>\nget_weather({PW})\nsearch({PS})\n</function_calls>"),
    Row("Olmo 3 thinking", t.OLMO,
        f"<think>{THOUGHT}</think>\n<function_calls>get_weather({PW})\nsearch({PS.replace('True', 'true')})</function_calls>",
        THOUGHT),
    Row("Gemma 4", t.GEMMA4, f"<|channel>thought\n{THOUGHT}\n<channel|>{t.GEMMA4_TEXT}", THOUGHT),
    Row("Gemma 4 answer", t.GEMMA4, f"<|channel>thought\n{THOUGHT}<channel|>Sunny.", THOUGHT, "Sunny.", ()),
    Row("Gemma 4 without thinking", t.GEMMA4, f"<|channel>thought\n<channel|>{t.GEMMA4_TEXT}"),
    Row("FunctionGemma", t.FGEMMA, t.FGEMMA_TEXT),
    Row("Kimi K2", t.KIMI, SAID + t.kimi("functions.get_weather:0", "functions.search:1"), "", SAID),
    Row("Kimi K2 thinking", t.KIMI,
        f"<think>{THOUGHT}</think>" + t.kimi("functions.get_weather:3", "functions.search:4"), THOUGHT),
    Row("Kimi K3", t.KIMI3,
        t.k3("think", THOUGHT) + t.k3("response", SAID) + t.KIMI3_TEXT + "<|close|>message<|sep|>", THOUGHT,
        SAID),
    Row("Kimi K3 answer", t.KIMI3, t.k3("think", THOUGHT) + t.k3("response", "Sunny."), THOUGHT, "Sunny.", ()),
    Row("Granite 3.2", t.GRANITE, f"<|tool_call|>{t.LIST}"),
    Row("Granite 3.3 thinking", t.GRANITE, f"<think>{THOUGHT}</think><response>{SAID}</response>", THOUGHT,
        SAID, ()),
    Row("Granite 3.3, calls", t.GRANITE, f"<think>{THOUGHT}</think><|tool_call|>{t.LIST}", THOUGHT),
    Row("Granite 3.2 in words", t.GRANITE,
        f"Here is my thought process:\n{THOUGHT}\nHere is my response:\n{SAID}", THOUGHT, SAID, ()),
    Row("Granite 20B", t.GRANITE20,
        f'<function_call> {{"name": "get_weather", "arguments": {W}}}<function_call> {{"name": "search", "arguments": {S}}}'),
    Row("Phi-4-mini", t.PHI4, f"<|tool_call|>{t.LIST}<|/tool_call|>"),
    Row("Phi-4-mini, functools", t.PHI4, f"functools{t.LIST}"),
    Row("Nemotron Nano v2", t.TOOLCALL, f"{THOUGHT}\n</think>\n\n<TOOLCALL>{t.LIST}</TOOLCALL>", THOUGHT),
    Row("Hunyuan A13B", t.HUNYUAN, f"<think>\n{THOUGHT}\n</think>\n<answer>\n{SAID}\n</answer>", THOUGHT,
        SAID, ()),
    Row("Hunyuan A13B, calls", t.HUNYUAN, f"<think>\n{THOUGHT}\n</think>\n<tool_calls>{t.LIST}</tool_calls>",
        THOUGHT),
    Row("Hunyuan 7B",
        template("<｜hy_ROLE｜>", "<｜hy_end｜>", "<｜hy_Assistant｜>",
            tools="Write <tool_calls>, then <tool_call>NAME\n```json\n{{ '{}' }}\n```</tool_call>. {{ offered }}",
            before="<tool_calls>", after="</tool_calls>", between="\n",
            call="{{- '<tool_call>function<tool_sep>' ~ c.name ~ '\n```json\n' ~ (c.arguments | tojson) ~ '\n```</tool_call>' }}"),
        f"<think>\n{THOUGHT}\n</think>\n<tool_calls>"
        f"<tool_call>function<tool_sep>get_weather\n```json\n{W}\n```</tool_call>\n"
        f"<tool_call>function<tool_sep>search\n```json\n{S}\n```</tool_call></tool_calls>",
        THOUGHT),
    Row("Jamba",
        template("<|ROLE|>", "<|eom|>", "<|bom|>", before="<tool_calls>[\n", after="\n]</tool_calls>",
            between=",\n", call=OBJECT),
        f"{SAID}<tool_calls>{t.LIST}</tool_calls>", "", SAID),
    Row("Command A", t.COMMAND,
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>{t.COMMAND_LIST}<|END_ACTION|>", THOUGHT),
    Row("Command R7B answer", t.COMMAND,
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>Sunny.<|END_RESPONSE|>", THOUGHT,
        "Sunny.", ()),
    Row("Command R+", t.ACTION, t.ACTION_TEXT, "", "Plan: First look, then search."),
    Row("Apertus", t.APERTUS,
        f'<|inner_prefix|>{THOUGHT}<|tools_prefix|>[{{"get_weather": {W}}}, {{"search": {S}}}]<|tools_suffix|>',
        THOUGHT),
    Row("Apertus answer", t.APERTUS, f"<|inner_prefix|>{THOUGHT}<|inner_suffix|>Sunny.", THOUGHT, "Sunny.",
        ()),
    Row("xLAM 2", t.XLAM, t.LIST),
    Row("xLAM 2 between fences", t.XLAM, f"```json\n{t.LIST}\n```"),
    Row("InternLM 2.5", t.INTERN,
        f'{SAID}<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {W}}}<|action_end|>', "",
        SAID, CALLS[:1]),
    Row("Intern-S1", t.INTERN, THOUGHTS + objects("<|action_start|><|plugin|>\n", "<|action_end|>", ""),
        THOUGHT),
    Row("Apriel 1.6", t.APRIEL, f"{THOUGHT}\n[BEGIN FINAL RESPONSE]\n{SAID}\n[END FINAL RESPONSE]", THOUGHT,
        SAID, ()),
    Row("Apriel 1.5, calls", t.APRIEL,
        f"{THOUGHT}\n[BEGIN FINAL RESPONSE]\n<tool_calls>{t.LIST}</tool_calls>\n[END FINAL RESPONSE]",
        THOUGHT),
    Row("Solar Open", t.SOLAR, f"<|think|>{THOUGHT}<|end|>{t.SOLAR_TEXT}", THOUGHT),
    Row("Solar Open answer", t.SOLAR, f"<|think|>{THOUGHT}<|end|><|begin|>assistant<|content|>Sunny.<|end|>",
        THOUGHT, "Sunny.", ()),
    Row("GigaChat 3.1", t.GIGA31,
        "".join(
            (f'<|function_call|>{{"name": "{n}", "arguments": {g}}}' for n, g in (("get_weather", W), ("search", S))))),
    Row("GigaChat 3", t.GIGA3,
        f'{SAID}<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {W}}}',
        "", SAID, CALLS[:1]),
    Row("MiniMax-M1", t.M1, f"{THOUGHTS}<tool_calls>\n{objects('', '')}\n</tool_calls>", THOUGHT),
    Row("Functionary 3.1", t.FUNCTIONARY31,
        f"<function=get_weather>{W}</function><function=search>{S}</function>"),
    Row("Functionary 3.2", t.FUNCTIONARY32, f"all\n{SAID}>>>get_weather\n{W}>>>search\n{S}", "", SAID),
    Row("Functionary 3.2, calls alone", t.FUNCTIONARY32, f"get_weather\n{W}>>>search\n{S}"),
    Row("Mistral Nemo", t.MISTRAL,
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {W}}}, {{"name": "search", "arguments": {S}}}]'),
    Row("Mistral Small 3.2", t.MISTRAL_ARGS,
        f"{SAID}[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]search[ARGS]{S}", "", SAID),
    Row("Magistral", t.MISTRAL_ARGS,
        f"[THINK]{THOUGHT}[/THINK][TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{W}[TOOL_CALLS]search[CALL_ID]abcdef124[ARGS]{S}",
        THOUGHT),
    Row("ERNIE 4.5 thinking", t.ERNIE, f"<think>\n{THOUGHT}\n</think>\n\n<response>\n{SAID}\n</response>\n",
        THOUGHT, SAID, ()),
    Row("ERNIE 4.5, calls", t.ERNIE, THOUGHTS + objects("<tool_call>\n", "\n</tool_call>", "\n\n"), THOUGHT),
    Row("LongCat", t.LONGCAT,
        f"<longcat_think>\n{THOUGHT}\n</longcat_think>\n"
        + objects("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        THOUGHT),
    Row("LongCat, pairs",
        template("[Round 0] ROLE:", "", " ASSISTANT:",
            call=t.pairs(r"<longcat_tool_call>NAME\n",
                r"<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>\n",
                "</longcat_tool_call>")),
        tagged("<longcat_tool_call>NAME\n",
            "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>\n",
            "</longcat_tool_call>")),
    Row("Step 3", t.STEP3, THOUGHTS + SAID + t.STEP3_TEXT, THOUGHT, SAID),
    Row("openPangu", t.PANGU, f"[unused16]{THOUGHT}[unused17][unused11]{t.LIST}[unused12]", THOUGHT),
    Row("SmolLM 2", t.SMOLLM2, f"<tool_call>{t.LIST}</tool_call>"),
    Row("Firefunction", t.FIRE, f"functools{t.LIST}"),
    Row("Qwen 2.5 Coder", t.TOOLS_TAG, objects("<tools>\n", "\n</tools>")),
    Row("MiniCPM 3", t.MINICPM3,
        f"<|thought_start|>\n{THOUGHT}\n<|thought_end|>\n<|tool_call_start|>\n```python\nget_weather({PW})\nsearch({PS})\n```\n<|tool_call_end|>",
        THOUGHT),
    Row("HyperCLOVA X", t.CLOVA, f" -> tool/function_call\n{t.LIST}"),
)
