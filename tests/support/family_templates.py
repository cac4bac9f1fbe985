# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Small chat templates of many families, and parts of the texts that their models write.

The templates are small ones, written for these tests with the marks of their families: names of variables,
white space, and the place of the tools differ from those that the models ship.
"""

from __future__ import annotations

import json
import re
from typing import Any

WEATHER: dict[str, Any] = {"city": "Paris", "days": 2}
SEARCH: dict[str, Any] = {"query": "007", "tags": ["a", "b"], "exact": True, "filters": {"lang": "fr"}}
CALLS = (("get_weather", WEATHER), ("search", SEARCH))
#: Arguments as JSON, and without blanks.
W, S = json.dumps(WEATHER), json.dumps(SEARCH)
WC, SC = (json.dumps(given, separators=(",", ":")) for given in (WEATHER, SEARCH))
#: Arguments as Python.
PW, PS = 'city="Paris", days=2', "query='007', tags=['a', 'b'], exact=True, filters={'lang': 'fr'}"
PARAMETERS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": "boolean"},
            "filters": {"type": "object", "properties": {"lang": {"type": "string"}}},
        },
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"Do {name}.", "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
THOUGHT = "The user asks about Paris.\nTwo days, so two calls."
SAID = "One moment, please."


def template(
    turn: str,
    end: str,
    answer: str,
    *,
    tools: str = "Functions: {{ offered }}",
    call: str = "",
    before: str = "",
    after: str = "",
    between: str = "",
    thought: str = "",
    role: str = "assistant",
    opened: str = "",
) -> str:
    """Return a small template.

    Args:
        turn: begins a message; ROLE is its role.
        answer: begins the model's.
        tools: tells of the tools; `offered` is their JSON.
        call, before, after, between: Jinja that writes calls `c`, with `c.name` and `c.arguments`.
        thought: Jinja that writes what the message `m` has thought, `m.reasoning_content`.
        opened: follows `answer` at a prompt's end.
    """
    shown = turn.replace("ROLE", f'" ~ (m.role if m.role != "assistant" else "{role}") ~ "')
    calls = (
        "{%- if m.tool_calls %}{{- BEFORE }}{%- for t in m.tool_calls %}{%- set c = t.function %}"
        f"{call}{{%- if not loop.last %}}{{{{- BETWEEN }}}}{{%- endif %}}{{%- endfor %}}{{{{- AFTER }}}}"
        "{%- endif %}"
    )
    for word, written in (("BEFORE", before), ("AFTER", after), ("BETWEEN", between)):
        calls = calls.replace(word, json.dumps(written, ensure_ascii=False))
    system = turn.replace("ROLE", "system")
    return (
        "{%- set offered = tools | tojson if tools else '' %}"
        f"{{%- if tools %}}{{{{- {_text(system)} }}}}{tools}{{{{- {_text(end)} }}}}{{%- endif %}}"
        "{%- for m in messages %}"
        f'{{%- if m.role == "assistant" %}}{{{{- {_text(answer)} }}}}{{%- else %}}{{{{- "{_quoted(shown)}" }}}}'
        "{%- endif %}"
        f"{{%- if m.role == 'assistant' and m.reasoning_content %}}{thought}{{%- endif %}}"
        "{{- m.content }}"
        f"{calls}{{{{- {_text(end)} }}}}"
        "{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- {_text(answer + opened)} }}}}{{%- endif %}}"
    )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quoted(shown: str) -> str:
    """A text between quotes, in which an expression has been put between quotes of its own."""
    pieces = re.split(r'(" ~ \(.*?\) ~ ")', shown)
    return "".join(piece if i % 2 else _text(piece)[1:-1] for i, piece in enumerate(pieces))


#: Ways to begin and end a message.
CHATML: Any = ("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n")
LLAMA_TURNS: Any = (
    "<|start_header_id|>ROLE<|end_header_id|>\n\n",
    "<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
LLAMA4_TURNS: Any = (
    "<|header_start|>ROLE<|header_end|>\n\n",
    "<|eot|>",
    "<|header_start|>assistant<|header_end|>\n\n",
)
GEMMA: Any = ("<start_of_turn>ROLE\n", "<end_of_turn>\n", "<start_of_turn>model\n")
BARS: Any = ("<|ROLE|>", "<|end|>", "<|assistant|>")
GLM_TURNS: Any = ("<|ROLE|>\n", "", "<|assistant|>")
DEEPSEEK: Any = ("<｜ROLE｜>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>")
GRANITE_TURNS: Any = (
    "<|start_of_role|>ROLE<|end_of_role|>",
    "<|end_of_text|>\n",
    "<|start_of_role|>assistant<|end_of_role|>",
)
COMMAND_TURNS: Any = (
    "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
)
NEMOTRON: Any = ("<SPECIAL_10>ROLE\n", "\n", "<SPECIAL_11>Assistant\n")

OBJECT = "{{- '{\"name\": \"' ~ c.name ~ '\", \"arguments\": ' ~ (c.arguments | tojson) ~ '}' }}"
PARAMETERS_OBJECT = OBJECT.replace('"arguments"', '"parameters"')
PYTHON = (
    "{{- c.name ~ '(' }}{%- for k, v in c.arguments.items() %}{{- k ~ '=' ~ (v | tojson) }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
)


def pairs(open_call: str, item: str, close_call: str) -> str:
    """Jinja of a call with an item for each argument, in which NAME, KEY and VALUE stand for what they say."""
    value = "' ~ (v if v is string else v | tojson) ~ '"
    items = item.replace("KEY", "' ~ k ~ '").replace("VALUE", value)
    head = open_call.replace("NAME", "' ~ c.name ~ '")
    return (
        f"{{{{- '{head}' }}}}{{%- for k, v in c.arguments.items() %}}{{{{- '{items}' }}}}{{%- endfor %}}"
        f"{{{{- '{close_call}' }}}}"
    )


def tagged(open_call: str, item: str, close_call: str) -> str:
    """Both calls as a model writes them, an item for each argument."""

    def written(name: str, given: dict[str, Any]) -> str:
        texts = ((k, v if isinstance(v, str) else json.dumps(v)) for k, v in given.items())
        items = "".join(item.replace("KEY", k).replace("VALUE", v) for k, v in texts)
        return open_call.replace("NAME", name) + items + close_call

    return "\n".join(written(name, given) for name, given in CALLS)


THINK = "{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}"
TOOL_CALL: Any = {"call": "{{- '<tool_call>\n' }}" + OBJECT + "{{- '\n</tool_call>' }}", "between": "\n"}


def objects(
    before: str, after: str, between: str = "\n", key: str = "arguments", compact: bool = False
) -> str:
    """Both calls as JSON objects, each between two texts."""
    given = (WC, SC) if compact else (W, S)
    head = '{"name":"%s","%s":%s}' if compact else '{"name": "%s", "%s": %s}'
    return between.join(
        before + head % (name, key, arguments) + after
        for (name, _), arguments in zip(CALLS, given, strict=True)
    )


THOUGHTS = f"<think>\n{THOUGHT}\n</think>\n\n"
OPENED = f"{THOUGHT}\n</think>\n\n"

# fmt: off
QWEN = template(*CHATML, **TOOL_CALL, thought=THINK)
QWQ = template(*CHATML, **TOOL_CALL, opened="<think>\n")
FUNCTION = pairs(r"<tool_call>\n<function=NAME>\n", r"<parameter=KEY>\nVALUE\n</parameter>\n",
    r"</function>\n</tool_call>")
CODER = template(*CHATML, call=FUNCTION, between="\n", thought=THINK)
CODER_TEXT = tagged("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n",
    "</function>\n</tool_call>")
SEED = template("<seed:bos>ROLE\n", "<seed:eos>", "<seed:bos>assistant\n",
    call=pairs(r"<seed:tool_call>\n<function=NAME>\n", r"<parameter=KEY>VALUE</parameter>\n",
        r"</function>\n</seed:tool_call>"),
    thought="{{- '<seed:think>' ~ m.reasoning_content ~ '</seed:think>' }}")
SEED_TEXT = tagged("<seed:tool_call>\n<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n",
    "</function>\n</seed:tool_call>")
GLM_CALL = pairs(r"\n<tool_call>NAME", r"\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>",
    r"\n</tool_call>")
GLM = template(*GLM_TURNS, call=GLM_CALL, thought="{{- '\n<think>' ~ m.reasoning_content ~ '</think>\n' }}")
GLM_ITEM = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
HY = "".join(
    (
        "{{- '<tool_call>' ~ c.name ~ '<tool_sep>\n' }}{%- for k, v in c.arguments.items() %}",
        "{{- '<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>\n' }}",
        "{%- endfor %}{{- '</tool_call>\n' }}",
    )
)
M2 = template("]~b]ROLE\n", "[e~[\n", "]~b]ai\n", before="<minimax:tool_call>\n",
    after="</minimax:tool_call>",
    call=pairs(r'<invoke name="NAME">\n', r'<parameter name="KEY">VALUE</parameter>\n', r"</invoke>\n"),
    opened="<think>\n")
N3 = "]<]minimax[>["
M3 = template("]~b]ROLE\n", "[e~[\n", "]~b]ai\n", before=f"{N3}<tool_call>\n", after=f"{N3}</tool_call>",
    call=pairs(rf'{N3}<invoke name="NAME">', rf"{N3}<KEY>VALUE{N3}</KEY>", rf"{N3}</invoke>\n"),
    thought="{{- '<mm:think>' ~ m.reasoning_content ~ '</mm:think>' }}")
M3_TEXT = (
    f'{N3}<tool_call>\n{N3}<invoke name="get_weather">{N3}<city>Paris{N3}</city>{N3}<days>2{N3}</days>'
    f'{N3}</invoke>\n{N3}<invoke name="search">{N3}<query>007{N3}</query>{N3}<tags>{N3}<item>a{N3}</item>'
    f"{N3}<item>b{N3}</item>{N3}</tags>{N3}<exact>true{N3}</exact>{N3}<filters>{N3}<lang>fr{N3}</lang>"
    f"{N3}</filters>{N3}</invoke>\n{N3}</tool_call>"
)
D = "｜DSML｜"


def dsml(word: str) -> str:
    def item(name: str, value: Any) -> str:
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value)
        return f'<{D}parameter name="{name}" string="{str(is_text).lower()}">{text}</{D}parameter>\n'

    calls = "\n".join(
        f'<{D}invoke name="{name}">\n{"".join(item(*pair) for pair in given.items())}</{D}invoke>'
        for name, given in CALLS
    )
    return f"<{D}{word}>\n{calls}\n</{D}{word}>"


def dsml_template(word: str) -> str:
    item = (
        f"{{{{- '<{D}parameter name=\"' ~ k ~ '\" string=\"' ~ ('true' if v is string else 'false') ~ '\">' ~ "
        f"(v if v is string else v | tojson) ~ '</{D}parameter>\n' }}}}"
    )
    return template(
        *DEEPSEEK,
        before=f"\n\n<{D}{word}>\n",
        after=f"\n</{D}{word}>",
        between="\n",
        call=f"{{{{- '<{D}invoke name=\"' ~ c.name ~ '\">\n' }}}}{{%- for k, v in c.arguments.items() %}}{item}"
        f"{{%- endfor %}}{{{{- '</{D}invoke>' }}}}",
        opened="<think>",
    )


DS = {word: f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}
DS3 = template(*DEEPSEEK, before=DS["calls▁begin"], after=DS["calls▁end"], between="\n",
    call=f"{{{{- '{DS['call▁begin']}function{DS['sep']}' ~ c.name ~ '\n```json\n' ~ (c.arguments | tojson) ~ "
    f"'\n```{DS['call▁end']}' }}}}")
DS3_TEXT = DS["calls▁begin"] + "\n".join(
    f"{DS['call▁begin']}function{DS['sep']}{name}\n```json\n{given}\n```{DS['call▁end']}"
    for name, given in (("get_weather", W), ("search", S))
)
DS31 = template(*DEEPSEEK, before=DS["calls▁begin"], after=DS["calls▁end"],
    call=f"{{{{- '{DS['call▁begin']}' ~ c.name ~ '{DS['sep']}' ~ (c.arguments | tojson) ~ '{DS['call▁end']}' }}}}",
    opened="</think>")
DS31_TEXT = (
    DS["calls▁begin"]
    + "".join(
        f"{DS['call▁begin']}{name}{DS['sep']}{given}{DS['call▁end']}"
        for name, given in (("get_weather", W), ("search", S))
    )
    + DS["calls▁end"]
)
HARMONY = template("<|start|>ROLE<|message|>", "<|end|>", "<|start|>assistant",
    tools="# Tools\n\nnamespace functions {{ offered }}",
    call="{{- '<|channel|>commentary to=functions.' ~ c.name ~ ' <|constrain|>json<|message|>' ~ (c.arguments | tojson) }}")
MUSE = template("<|start|>ROLE<|message|>", "<|eot|>", "<|start|>assistant",
    call="{{- ' to=' ~ c.name ~ '<|message|><atem:function_calls>\n' }}"
    + pairs(r'<atem:invoke name="NAME">\n', r'<atem:parameter name="KEY">VALUE</atem:parameter>\n', r"</atem:invoke>\n")
    + "{{- '</atem:function_calls>' }}")
MINICPM5 = template(*CHATML,
    call=pairs(r'<function name="NAME">', r'<param name="KEY">VALUE</param>', r"</function>"), between="\n")
LLAMA = template(*LLAMA_TURNS, tools='Answer with {"name": function, "parameters": values}. {{ offered }}',
    call=PARAMETERS_OBJECT)
LLAMA_PYTHON = template(*LLAMA_TURNS,
    tools="Use the format [func_name1(params_name1=params_value1, params_name2=params_value2...)]. {{ offered }}",
    before="[", after="]", between=", ", call=PYTHON)
LLAMA4 = template(*LLAMA4_TURNS, before="[", after="]", between=", ", call=PYTHON)
LLAMA4_JSON = template(*LLAMA4_TURNS, call=PARAMETERS_OBJECT)
GEMMA3 = template(*GEMMA, role="model", before="```tool_code\n", after="\n```", between="\n", call=PYTHON)
LFM2 = template(*CHATML, tools="List of tools: {{ offered }}", before="<|tool_call_start|>[",
    after="]<|tool_call_end|>", between=", ", call=PYTHON)
OLMO = template(*CHATML, before="<function_calls>", after="</function_calls>", between="\n", call=PYTHON)
G4 = '<|"|>'
GEMMA4 = template("<|turn>ROLE\n", "<turn|>\n", "<|turn>model\n",
    call="{{- '<|tool_call>call:' ~ c.name ~ '{' }}{%- for k, v in c.arguments.items() %}"
    f"{{{{- k ~ ':' ~ ('{G4}' ~ v ~ '{G4}' if v is string else v | tojson) }}}}"
    "{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}{{- '}<tool_call|>' }}")
GEMMA4_TEXT = (
    f"<|tool_call>call:get_weather{{city:{G4}Paris{G4},days:2}}<tool_call|><|tool_call>call:search{{query:"
    f"{G4}007{G4},tags:[{G4}a{G4},{G4}b{G4}],exact:true,filters:{{lang:{G4}fr{G4}}}}}<tool_call|>"
)
FGEMMA = template(*GEMMA, role="model",
    call="{{- '<start_function_call>call:' ~ c.name ~ '{' }}{%- for k, v in c.arguments.items() %}"
    "{{- k ~ ':' ~ ('<escape>' ~ v ~ '<escape>' if v is string else v | tojson) }}"
    "{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}{{- '}<end_function_call>' }}")
FGEMMA_TEXT = (
    GEMMA4_TEXT.replace(G4, "<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
)
KIMI = template("<|im_ROLE|>ROLE<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>",
    before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
    call="{{- '<|tool_call_begin|>' ~ t.id ~ '<|tool_call_argument_begin|>' ~ (c.arguments | tojson) ~ '<|tool_call_end|>' }}")


def kimi(*ids: str) -> str:
    calls = "".join(
        f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{given}<|tool_call_end|>"
        for call_id, given in zip(ids, (W, S), strict=True)
    )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def k3(word: str, text: str, attributes: str = "") -> str:
    return f"<|open|>{word}{attributes}<|sep|>{text}<|close|>{word}<|sep|>"


_KIMI3_ITEM = (
    "{{- '<|open|>argument key=\"' ~ k ~ '\" type=\"' ~ ('string' if v is string else 'object') ~ '\"<|sep|>' ~ "
    "(v if v is string else v | tojson) ~ '<|close|>argument<|sep|>' }}"
)
KIMI3 = template('<|open|>message role="ROLE"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="assistant"<|sep|>',
    before="<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
    after="<|close|>tools<|sep|>",
    call="{{- '<|open|>call tool=\"' ~ c.name ~ '\" index=\"' ~ loop.index ~ '\"<|sep|>' }}{%- for k, v in "
    f"c.arguments.items() %}}{_KIMI3_ITEM}{{%- endfor %}}{{{{- '<|close|>call<|sep|>' }}}}")


def _k3_call(index: int, name: str, given: dict[str, Any]) -> str:
    kinds = {str: "string", int: "number", bool: "boolean", dict: "object", list: "array"}
    items = "".join(
        k3("argument", v if isinstance(v, str) else json.dumps(v), f' key="{k}" type="{kinds[type(v)]}"')
        for k, v in given.items()
    )
    return k3("call", items, f' tool="{name}" index="{index}"')


KIMI3_TEXT = k3("tools", "".join(_k3_call(i + 1, *call) for i, call in enumerate(CALLS)))
GRANITE = template(*GRANITE_TURNS, before="<|tool_call|>[", after="]", between=", ", call=OBJECT)
LIST = f'[{{"name": "get_weather", "arguments": {W}}}, {{"name": "search", "arguments": {S}}}]'
PHI4 = template(*BARS, tools="<|tool|>{{ offered }}<|/tool|>", before="<|tool_call|>[",
    after="]<|/tool_call|>", between=", ", call=OBJECT)
TOOLCALL = template(*NEMOTRON, tools="<AVAILABLE_TOOLS>{{ offered }}</AVAILABLE_TOOLS>", before="<TOOLCALL>[",
    after="]</TOOLCALL>", between=", ", call=OBJECT, opened="<think>\n")
HUNYUAN = template("<|startoftext|>ROLE:", "<|eos|>", "<|startoftext|>", before="<tool_calls>[",
    after="]</tool_calls>", between=", ", call=OBJECT)
COMMAND = template(*COMMAND_TURNS, before="<|START_ACTION|>[", after="]<|END_ACTION|>", between=",",
    call='{{- \'\n    {"tool_call_id": "\' ~ loop.index0 ~ \'", "tool_name": "\' ~ c.name ~ \'", "parameters": \' ~ '
    "(c.arguments | tojson) ~ '}' }}")
COMMAND_LIST = (
    f'[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {W}}},\n'
    f'    {{"tool_call_id": "1", "tool_name": "search", "parameters": {S}}}\n]'
)
APERTUS = template("<|ROLE_start|>", "<|assistant_end|>", "<|assistant_start|>", before="<|tools_prefix|>[",
    after="]<|tools_suffix|>", between=", ",
    call="{{- '{\"' ~ c.name ~ '\": ' ~ (c.arguments | tojson) ~ '}' }}")
XLAM = template(*CHATML,
    tools='Make calls in a single JSON array: [{"name": "tool_call_name", "arguments": {}}]. {{ offered }}',
    before="[", after="]", between=", ", call=OBJECT)
INTERN = template(*CHATML, before="<|action_start|><|plugin|>\n", after="<|action_end|>",
    between="<|action_end|><|action_start|><|plugin|>\n", call=PARAMETERS_OBJECT)
APRIEL = template("<|ROLE|>\n", "<|end|>\n", "<|assistant|>\n",
    tools="Think first, then write [BEGIN FINAL RESPONSE]. {{ offered }}", before="<tool_calls>[",
    after="]</tool_calls>", between=", ", call=OBJECT, opened="Here are my reasoning steps:\n")
SOLAR = template("<|begin|>ROLE<|content|>", "<|end|>", "<|begin|>assistant", before="<|tool_calls|>",
    after="<|calls|>",
    call="{{- '<|tool_call:begin|>' ~ t.id ~ '<|tool_call:name|>' ~ c.name ~ '<|tool_call:args|>' ~ (c.arguments | tojson) ~ "
    "'<|tool_call:end|>' }}")
SOLAR_TEXT = (
    "<|begin|>assistant<|tool_calls|>"
    + "".join(
        f"<|tool_call:begin|>q1w2e3r4{i}<|tool_call:name|>{name}<|tool_call:args|>{given}<|tool_call:end|>"
        for i, (name, given) in enumerate((("get_weather", W), ("search", S)))
    )
    + "<|calls|>"
)
GIGA31 = template("ROLE<|role_sep|>\n", "<|message_sep|>\n\n", "assistant<|role_sep|>\n",
    call="{{- '<|function_call|>' }}" + OBJECT)
GIGA3 = template("ROLE<|role_sep|>\n", "<|message_sep|>\n\n", "assistant<|role_sep|>\n",
    call="{{- '<|message_sep|>\n\nfunction call<|role_sep|>\n' }}" + OBJECT)
M1 = template("<beginning_of_sentence>ROLE\n", "<end_of_sentence>\n",
    "<beginning_of_sentence>ai name=assistant\n", before="<tool_calls>\n", after="\n</tool_calls>",
    between="\n", call=OBJECT)
FUNCTIONARY31 = template(*LLAMA_TURNS, tools="To call, write start_tag => `<function`, and {{ offered }}",
    call="{{- '<function=' ~ c.name ~ '>' ~ (c.arguments | tojson) ~ '</function>' }}")
FUNCTIONARY32 = template("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    call="{{- '>>>' ~ c.name ~ '\n' ~ (c.arguments | tojson) }}", opened=">>>")
MISTRAL = template("[INST]", "[/INST]", "", tools="[AVAILABLE_TOOLS]{{ offered }}[/AVAILABLE_TOOLS]",
    before="[TOOL_CALLS] [", after="]</s>", between=", ",
    call='{{- \'{"name": "\' ~ c.name ~ \'", "arguments": \' ~ (c.arguments | tojson) ~ \', "id": "\' ~ t.id ~ \'"}\' }}')
MISTRAL_ARGS = template("[INST]", "[/INST]", "", tools="[AVAILABLE_TOOLS]{{ offered }}[/AVAILABLE_TOOLS]",
    call="{{- '[TOOL_CALLS]' ~ c.name ~ '[ARGS]' ~ (c.arguments | tojson) }}")
ERNIE = template("<|ROLE_begin|>", "<|im_end|>\n", "<|im_start|>assistant\n", **TOOL_CALL,
    thought="{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' }}",
    tools="Answer within <response>\n and \n</response>. {{ offered }}")
LONGCAT = template("[Round 0] ROLE:", "", " ASSISTANT:",
    call="{{- '<longcat_tool_call>\n' }}" + OBJECT + "{{- '\n</longcat_tool_call>' }}", between="\n")
ST = (
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
)
STEP3 = template("<|BOT|>ROLE\n", "<|EOT|>", "<|BOT|>assistant\n", before=ST[0], after=ST[1],
    call=pairs(rf'{ST[2]}function{ST[4]}<steptml:invoke name="NAME">',
        r'<steptml:parameter name="KEY">VALUE</steptml:parameter>', rf"</steptml:invoke>{ST[3]}"))
STEP3_TEXT = (
    ST[0]
    + tagged(
        f'{ST[2]}function{ST[4]}<steptml:invoke name="NAME">',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        f"</steptml:invoke>{ST[3]}",
    )
    + ST[1]
)
PANGU = template("[unused9]ROLE:", "[unused10]", "[unused9]assistant:", before="[unused11][",
    after="][unused12]", between=", ", call=OBJECT)
SMOLLM2 = template(*CHATML,
    tools="You are a helpful AI assistant named SmolLM, trained by Hugging Face {{ offered }}",
    before="<tool_call>[", after="]</tool_call>", between=", ", call=OBJECT)
FIRE = template(*LLAMA_TURNS, tools="Write functools[...]. {{ offered }}", before=" functools[", after="]",
    between=", ", call=OBJECT)
ACTION = template(*COMMAND_TURNS, before="Action: ```json\n[", after="]```", between=",",
    call="{{- '\n    {\n        \"tool_name\": \"' ~ c.name ~ '\",\n        \"parameters\": ' ~ (c.arguments | tojson) ~ '\n    }' }}")
ACTION_TEXT = (
    'Plan: First look, then search.\nAction: ```json\n[\n    {\n        "tool_name": "get_weather",\n        '
    f'"parameters": {W}\n    }},\n    {{\n        "tool_name": "search",\n        "parameters": {S}\n    }}\n]```'
)
TOOLS_TAG = template(*CHATML, tools="Call like this: <tools>\n{{ '{}' }}\n</tools>\n{{ offered }}",
    call="{{- '<tools>\n' }}" + OBJECT + "{{- '\n</tools>\n' }}")
MINICPM3 = template(*CHATML, before="<|tool_call_start|>\n```python\n", after="```\n<|tool_call_end|>\n",
    call=PYTHON + "{{- '\n' }}",
    thought="{{- '<|thought_start|>\n' ~ m.reasoning_content ~ '\n<|thought_end|>\n' }}")
CLOVA = template("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant",
    before=" -> tool/function_call\n[", after="]", between=", ", call=OBJECT)
GRANITE20 = template("\nROLE: ", "<|endoftext|>", "\nASSISTANT: ",
    tools="<|function_call_library|>\n{{ offered }}",
    call="{{- '<function_call> ' ~ ({'name': c.name, 'arguments': c.arguments} | tojson) }}")
