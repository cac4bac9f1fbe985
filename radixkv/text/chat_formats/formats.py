"""The chat formats that are known, one declaration each, and which of them a model speaks.

Where one mark begins with another, all steps between the two are listed (see `Region`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from radixkv.text.chat_formats.calls import CallSyntax
from radixkv.text.chat_formats.format import ChatFormat

AUTO, PLAIN = "auto", "plain"

_THINK = (
    ("<think>", "<think>\n"),
    (
        *("</think>", "</think>\n", "</think>\n\n"),
        *("\n</think>", "\n</think>\n", "\n</think>\n\n"),
    ),
)
_TOOL_CALL = (
    ("<tool_call>", "<tool_call>\n", "\n<tool_call>", "\n<tool_call>\n"),
    ("</tool_call>", "\n</tool_call>"),
)
_PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures as JSON:\n<tools>\nTOOLS\n</tools>\n\n"
    "To call functions, answer with nothing but the calls, in exactly this form:\nEXAMPLE"
)

HERMES = ChatFormat(
    "hermes",  # Hermes 2 and 3, Qwen 2.5 and 3, QwQ, and many others
    reasoning=_THINK,
    calls=_TOOL_CALL,
    syntax=CallSyntax('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    special_tokens=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    preamble=_PREAMBLE,
)

SMOLLM2 = ChatFormat(
    "smollm2",
    reasoning=_THINK,
    calls=_TOOL_CALL,
    syntax=CallSyntax(
        '{"name": "NAME", "arguments": ', "}", begin="<tool_call>[", between=", ", end="]</tool_call>"
    ),
    special_tokens=HERMES.special_tokens,
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

SMOLLM3 = ChatFormat(
    "smollm3",
    reasoning=_THINK,
    calls=_TOOL_CALL,
    syntax=HERMES.syntax,
    special_tokens=HERMES.special_tokens,
    preamble=_PREAMBLE,
    tools_option="xml_tools",
)

LLAMA3 = ChatFormat(
    "llama3",
    reasoning=_THINK,
    calls=(("<|python_tag|>", '{"name":', '{"type": "function", "name":'), ()),
    syntax=CallSyntax('{"name": "NAME", "parameters": ', "}", between="; "),
    special_tokens=("<|python_tag|>",),
    preamble=_PREAMBLE,
)

MISTRAL = ChatFormat(
    "mistral",
    reasoning=(("[THINK]",), ("[/THINK]",)),
    calls=(("[TOOL_CALLS]", "[TOOL_CALLS] "), ()),
    syntax=CallSyntax('{"name": "NAME", "arguments": ', "}", begin="[TOOL_CALLS] [", between=", ", end="]"),
    special_tokens=("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    preamble=_PREAMBLE,
    call_id_length=9,
)

MISTRAL_ARGS = ChatFormat(
    "mistral-args",  # tokenizers from version 11 on: Mistral Small 3.2, Magistral, Devstral
    reasoning=MISTRAL.reasoning,
    calls=(("[TOOL_CALLS]",), ()),
    syntax=CallSyntax(
        "[TOOL_CALLS]NAME[ARGS]",
        "",
        between="",
        head_pattern=r"(?:\[TOOL_CALLS\])?(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*(?=\{)",
    ),
    special_tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    preamble=_PREAMBLE,
    call_id_length=9,
)

_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

DEEPSEEK = ChatFormat(
    "deepseek",  # V3 and R1; V3.1's shorter calls are read, too
    reasoning=_THINK,
    calls=((_DS_BEGIN, _DS_CALL), (_DS_END,)),
    syntax=CallSyntax(
        f"{_DS_CALL}function{_DS_SEP}NAME\n```json\n",
        f"\n```{_DS_CALL_END}",
        begin=_DS_BEGIN,
        end=_DS_END,
        head_pattern=(
            rf"\s*(?:{_DS_CALL})?\s*(?:function{_DS_SEP})?(?P<name>[\w.-]+)"
            rf"(?:{_DS_SEP}|\s*\n```(?:json)?)\s*(?=\{{)"
        ),
        between_pattern=rf"(?:[\s`]|{_DS_CALL_END})*",
    ),
    special_tokens=("<think>", "</think>", _DS_BEGIN, _DS_END, _DS_CALL, _DS_CALL_END, _DS_SEP),
    preamble=_PREAMBLE,
)

_MESSAGE = "<|message|>"


def _channels(*headers: str) -> tuple[str, ...]:
    """Marks of Harmony: each header at the beginning of an answer, and of a further message."""
    return tuple(start + header for header in headers for start in ("", "<|start|>assistant"))


HARMONY = ChatFormat(
    "harmony",  # gpt-oss
    reasoning=(_channels(f"<|channel|>analysis{_MESSAGE}"), ("<|end|>",)),
    spoken=(
        _channels(
            f"<|channel|>final{_MESSAGE}",
            f"<|channel|>final <|constrain|>json{_MESSAGE}",
            f"<|channel|>commentary{_MESSAGE}",
        ),
        ("<|end|>", "<|return|>"),
    ),
    calls=(
        _channels(
            "<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.", " to=functions."
        ),
        ("<|call|>", "<|end|>"),
    ),
    syntax=CallSyntax(
        f"<|channel|>commentary to=functions.NAME <|constrain|>json{_MESSAGE}",
        "<|call|>",
        between="<|start|>assistant",
        head_pattern=(
            r"(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json|code)?\s*"
            r"<\|message\|>\s*(?=\{)"
        ),
    ),
    special_tokens=(
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
    ),
    preamble=_PREAMBLE,
)

#: Name -> format.
FORMATS = MappingProxyType(
    {
        known.name: known
        for known in (
            *(HERMES, SMOLLM2, SMOLLM3, LLAMA3, MISTRAL, MISTRAL_ARGS, DEEPSEEK, HARMONY),
            ChatFormat(PLAIN),
        )
    }
)
#: What `--chat-format` takes.
FORMAT_NAMES = (AUTO, *FORMATS)

#: Texts of a chat template -> the format that its family speaks; the first that applies.
_SIGNS: tuple[tuple[tuple[str, ...], ChatFormat], ...] = (
    (("<|channel|>",), HARMONY),
    ((_DS_BEGIN,), DEEPSEEK),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|python_tag|>",), LLAMA3),
    (("<|start_header_id|>", '"parameters"'), LLAMA3),
    (("xml_tools",), SMOLLM3),
    (("<tool_call>",), HERMES),
    (("named SmolLM", "trained by Hugging Face"), SMOLLM2),
)
#: Texts that are one token in a vocabulary -> the format, where the template shows no sign.
_TOKENS: tuple[tuple[str, ChatFormat], ...] = (
    ("<|channel|>", HARMONY),
    (_DS_BEGIN, DEEPSEEK),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
)


def find_format(name: str, chat_template: str | None, is_token: Callable[[str], bool]) -> ChatFormat:
    """The format of that name; `auto`: the one that a model speaks, by the signs of its family.

    Args:
        name: one of `FORMAT_NAMES`.
        chat_template: text of the model's template; None: unknown.
        is_token: whether a text is one token of the model's vocabulary.
    """
    if name != AUTO:
        return FORMATS[name]
    template = chat_template or ""
    for signs, known in _SIGNS:
        if all(sign in template for sign in signs):
            return known
    # A template that knows no calls: what its preamble will say is up to us.
    return next((known for text, known in _TOKENS if is_token(text)), HERMES)
