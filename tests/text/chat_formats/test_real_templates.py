# SPDX-License-Identifier: Apache-2.0
"""Chat templates that models ship: the format of each, and prompts that forced calls continue exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shipped_templates import (
    ARE_EXACT,
    ASKED,
    FOLDER,
    NO_FOLDER,
    TABLE,
    TOOL,
    ShippedTemplate,
    known,
    templates,
)

from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.derive import shown_text
from radixkv.text.chat_formats.template_input import can_show_tools_first, template_messages

pytestmark = pytest.mark.skipif(not FOLDER, reason=NO_FOLDER)

ARGUMENTS = '{"city": "Paris", "days": 2}'


def forced(template: ShippedTemplate, prompt: str) -> tuple[str, str]:
    """Return a forced call as the grammar wants it, and the thoughts before it."""
    chat_format = template.format
    written = chat_format.write_calls([("get_weather", ARGUMENTS)], [TOOL])
    opened = chat_format.opened_by(prompt)
    if chat_format.thinking is not None:
        opening, closing, after = chat_format.thinking
        return (
            "" if chat_format.thinks(opened) else opening
        ) + "A city." + closing + after + written, "A city."
    if chat_format.thinks(opened) and chat_format.reasoning is not None:
        return f"A city.{chat_format.reasoning.closes[0]}\n{written}", "A city."
    if opened:
        return written.removeprefix(opened), ""
    return (chat_format.lead or "") + written, ""


@pytest.mark.parametrize("name", templates())
def test_the_table_of_templates(name: str) -> None:
    template = known(name)
    prompt = template.prompt()
    text, thought = forced(template, prompt)
    parser = template.format.parser(tools={"get_weather": TOOL["function"]["parameters"]}, prompt_end=prompt)
    answer = Answer.of([*parser.push(text), *parser.finish()])
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    assert (answer.reasoning.strip(), answer.content) == (thought, "")
    if isinstance(template.format.forms[0].arguments, JsonArguments):
        assert call.arguments == ARGUMENTS
    said = {"role": "assistant", "content": "", "reasoning_content": thought}
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    said["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "sunny"}
    after = template.prompt(said, result)
    is_exact = after.startswith(prompt + text.rstrip()) and bool(prompt)
    if name in TABLE:
        assert (template.format.name, is_exact) == (TABLE[name][0], TABLE[name][1] in ARE_EXACT)


@pytest.mark.parametrize("name", templates())
def test_tools_come_first_where_the_template_lets_them(name: str) -> None:
    template = known(name)
    rest = "Keep to the rules of the house."

    def prompt(folder: str, **options: bool) -> str:
        said = [{"role": "system", "content": f"Folder: {folder}. {rest}"}, dict(ASKED)]
        given = template_messages(said, [TOOL], template.format, template.traits, **options)
        return shown_text(template.render, given, [TOOL] if template.traits.tools else None)

    usual, red, blue = prompt("red"), prompt("red", tools_first=True), prompt("blue", tools_first=True)
    if not can_show_tools_first(template.format, template.traits):
        assert red == usual
        return
    shared = red[: next(i for i, (one, other) in enumerate(zip(red, blue, strict=False)) if one != other)]
    assert "Tell the weather." in shared
    assert shared.endswith("Folder: ")
    for text in ("Tell the weather.", rest, ASKED["content"]):
        assert red.count(text) == usual.count(text) == 1


#: Template -> other marks for its own, and what its model would write, in pieces around the arguments.
RENAMED = {
    "GLM-4.6": (
        {"tool_call>": "do>", "arg_key>": "k>", "arg_value>": "v>", "think>": "hm>"},
        "\n<hm>A city.</hm>\n<do>get_weather\n<k>city</k>\n<v>Paris</v>\n<k>days</k>\n<v>2</v>\n</do>",
    ),
    "NVIDIA-Nemotron-Nano-v2": (
        {"TOOLCALL": "ACTS"},
        f'A city.\n</think>\n\n<ACTS>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]</ACTS>',
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": (
        {"[TOOL_CALLS]": "[ACTS]"},
        f'[ACTS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    ),
}


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_marks_that_no_family_has_are_read_off_the_template(name: str, tmp_path: Path) -> None:
    others, text = RENAMED[name]
    source = known(name).text
    for mark, other in others.items():
        source = source.replace(mark, other)
    path = tmp_path / "renamed.jinja"
    path.write_text(source, encoding="utf-8")
    template = ShippedTemplate(path)
    parser = template.format.parser(
        tools={"get_weather": TOOL["function"]["parameters"]}, prompt_end=template.prompt()
    )
    answer = Answer.of([*parser.push(text), *parser.finish()])
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    assert (answer.reasoning, answer.content) == ("A city." if "A city." in text else "", "")
