# SPDX-License-Identifier: Apache-2.0
"""Every chat format: what its parser makes of answers, sound, malformed and hostile, however they come."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import by_day

from radixkv.text.chat_formats.answer import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
)
from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.format_parser import HELD, TELLING
from radixkv.text.chat_formats.formats import FORMATS, find_format

#: Format -> how the prompt ends, an answer with two calls, and its (content, reasoning, arguments by name).
ANSWERS = {
    "hermes": (
        "<|im_start|>assistant\n",
        "<think>\nI think\n\nso.\n</think>\n\nLet me\n\nlook.\n<tool_call>\n"
        '{"name": "look", "arguments": {"a":  1, "b": "</tool"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "wait", "arguments": {}}\n</tool_call>',
        ("Let me\n\nlook.", "I think\n\nso.", {"look": '{"a":  1, "b": "</tool"}', "wait": "{}"}),
    ),
    "smollm2": (
        "<|im_start|>assistant\n",
        '<tool_call>[{"name": "look", "arguments": {"a": [1, {"b": "}"}]}}, '
        '{"name": "wait", "arguments": {}}]</tool_call>',
        ("", "", {"look": '{"a": [1, {"b": "}"}]}', "wait": "{}"}),
    ),
    "smollm3": (
        "<|im_start|>assistant\n<think>\n",
        'Hm.\n</think>\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>',
        ("", "Hm.", {"look": '{"a": 1}'}),
    ),
    "llama3": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '{"name": "look", "parameters": {"a": "é\\n"}}; {"name": "wait", "parameters": {}}',
        ("", "", {"look": '{"a": "é\\n"}', "wait": "{}"}),
    ),
    "mistral": (
        "[/INST]",
        'Sure.[TOOL_CALLS] [{"name": "look", "arguments": {"a":1}, "id": "abcdef123"}, '
        '{"name": "wait", "arguments": {}}]',
        ("Sure.", "", {"look": '{"a":1}', "wait": "{}"}),
    ),
    "mistral-args": (
        "[/INST]",
        '[THINK]Hm.[/THINK]Sure.[TOOL_CALLS]look[ARGS]{"a": 1}[TOOL_CALLS]wait[CALL_ID]abcdef123[ARGS]{}',
        ("Sure.", "Hm.", {"look": '{"a": 1}', "wait": "{}"}),
    ),
    "deepseek": (
        "<｜Assistant｜><think>\n",
        "Hm,\nwell.\n</think>\n\nLet me look.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("Let me look.", "Hm,\nwell.", {"look": '{"a": 1}', "wait": "{}"}),
    ),
    "harmony": (
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json"
        '<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.wait '
        "<|constrain|>json<|message|>{}",
        ("Let me look.", "Hm.", {"look": '{"a": 1}', "wait": "{}"}),
    ),
}
MALFORMED = {
    "hermes": [
        "<tool_call>\nnonsense\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    ],
    "smollm2": [
        "<tool_call>[]</tool_call>",
        '<tool_call>[{"name": "f", "arguments": 1}]</tool_call>',
        "<tool_call>",
    ],
    "smollm3": [
        '<tool_call>\n{"arguments": {}}\n</tool_call>\n',
        '<tool_call>{"name": "f", "arguments": {"a"',
    ],
    "llama3": [
        '{"name": "Ada", "age": 36}',
        "<|python_tag|>print(1)",
        'As JSON: {"name": "f", "parameters": {}}',
    ],
    "mistral": ["[TOOL_CALLS] nonsense", '[TOOL_CALLS] [{"name": "f", "arguments": {}}'],
    "mistral-args": ["[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f{}", '[TOOL_CALLS]f[ARGS]{"a"'],
    "deepseek": [
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    ],
    "harmony": ["<|channel|>commentary to=functions.f <|constrain|>json<|message|>{<|call|>"],
}
FAMILIES = list(ANSWERS)


def events_of(name: str, parts: Iterable[str], *, cut: bool = False, **options: Any) -> list[AnswerEvent]:
    parser = FORMATS[name].parser(**options)
    events = [event for part in parts for event in parser.push(part)]
    return events + parser.finish(cut=cut)


def parse(name: str, parts: Iterable[str], **options: Any) -> Answer:
    answer = Answer()
    answer.add(events_of(name, parts, **options))
    for number, call in enumerate(answer.tool_calls):
        call.id = f"id-{number}"  # drawn at random, where the model gives none
    return answer


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_the_same_however_it_comes(name: str) -> None:
    prompt_end, text, (content, reasoning, calls) = ANSWERS[name]
    whole = parse(name, [text], prompt_end=prompt_end)
    assert (whole.content, whole.reasoning) == (content, reasoning)
    assert {call.name: call.arguments for call in whole.tool_calls} == calls
    assert parse(name, text, prompt_end=prompt_end) == whole
    for at in range(1, len(text)):
        assert parse(name, [text[:at], text[at:]], prompt_end=prompt_end) == whole, text[:at]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in FAMILIES for text in MALFORMED[name]])
def test_a_malformed_call_is_text(name: str, text: str) -> None:
    for said in (text, "Well: " + text):
        assert parse(name, [said]) == Answer(said) == parse(name, said)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tools_a_call_is_text_and_reasoning_still_reasoning(name: str) -> None:
    prompt_end, text, (_, reasoning, _) = ANSWERS[name]
    answer = parse(name, [text], prompt_end=prompt_end, calls=False)
    assert not answer.tool_calls
    assert answer.reasoning == reasoning
    assert "look" in answer.content
    assert answer == parse(name, text, prompt_end=prompt_end, calls=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_again(name: str) -> None:
    known = FORMATS[name]
    calls = [("look", '{"city":  "Paris", "days": [1, 2]}'), ("wait", "{}")]
    answer = parse(name, [known.write_calls(calls)])
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert not answer.content
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    preamble = known.write_preamble([tool])
    assert '"name": "look"' in preamble
    assert "TOOLS" not in preamble
    assert "EXAMPLE" not in preamble


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_first_call_where_calls_are_not_parallel(name: str) -> None:
    prompt_end, text, _ = ANSWERS[name]
    calls = parse(name, [text], prompt_end=prompt_end, parallel=False).tool_calls
    assert [call.name for call in calls] == ["look"]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "\n\n", " ", "<", "text", '{"name": "f", '),
    *('"arguments": {', '"a": 1', "}", "}}", "]", "[", '"', "\\", "[TOOL_CALLS]", "[ARGS]", "f", ", ", "; "),
    *("<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"),
    *("commentary to=functions.", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *(
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "\n```json\n",
        "\n```",
        "x" * 300,
        '{"name": "f", "parameters": {',
    ),
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.lists(st.integers(0, 2000), max_size=8),
    st.booleans(),
)
def test_any_text_is_the_same_however_it_comes(
    name: str, fragments: list[str], cuts: list[int], calls: bool
) -> None:
    text = "".join(fragments)
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    for cut in (False, True):
        whole = parse(name, [text], calls=calls, cut=cut)
        assert parse(name, parts, calls=calls, cut=cut) == whole
        assert parse(name, text, calls=calls, cut=cut) == whole
        for pieces in ([text], parts, text):
            for event in events_of(name, pieces, calls=calls, cut=cut):
                if isinstance(event, ContentDelta):
                    assert text.startswith(event.text, event.start)


@pytest.mark.parametrize("name", ["hermes", "smollm2", "harmony", "deepseek", "mistral-args"])
def test_long_arguments_come_before_their_end(name: str) -> None:
    arguments = '{"text": "%s", "brace": "}", "list": [{"a": "\\\\\\""}]}' % ("word " * HELD)
    calls = [("look", arguments), ("wait", "{}"), ("look", arguments)]
    text = FORMATS[name].write_calls(calls)
    parser = FORMATS[name].parser()
    early = [
        event for part in (text[: HELD + 100], text[HELD + 100 : 2 * HELD]) for event in parser.push(part)
    ]
    assert isinstance(early[0], ToolCallBegin)
    assert all(isinstance(event, ToolCallArguments) for event in early[1:])
    assert sum(len(event.text) for event in early[1:] if isinstance(event, ToolCallArguments)) > HELD // 2
    answer = parse(name, text)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert not answer.content
    assert parse(name, [text]) == answer


def test_a_long_text_that_begins_like_no_call_comes_as_it_is() -> None:
    text = '<tool_call>\n{"names": [' + '"x", ' * HELD
    events = events_of("hermes", [text[: 2 * HELD]])
    assert all(isinstance(event, ContentDelta) for event in events)
    assert parse("hermes", text) == Answer(text)


def test_a_long_call_that_is_cut_off_keeps_what_there_is() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "' + "x" * 1000
    answer = parse("hermes", text)
    assert answer.tool_calls == [ToolCall("id-0", "f", '{"a": "' + "x" * 1000)]


def test_content_goes_on_after_a_call() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    answer = parse("hermes", f"One.\n{call}\n\nTwo.")
    assert answer.content == "One.\n\nTwo."
    assert len(answer.tool_calls) == 1
    assert parse("hermes", f"\n{call}\n \n").content == ""
    assert parse("hermes", " \n").content == " \n", "an answer of nothing else"


def test_an_empty_reasoning_of_the_prompt_is_closed() -> None:
    answer = parse("hermes", "Hi.", prompt_end="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert answer == Answer("Hi.")


def test_ids_have_the_form_that_templates_take() -> None:
    mistral = FORMATS["mistral"]
    events = events_of("mistral", [ANSWERS["mistral"][1]])
    ids = [event.id for event in events if isinstance(event, ToolCallBegin)]
    assert ids[0] == "abcdef123", "the model's own"
    assert len(ids[1]) == 9
    assert ids[1].isalnum()
    assert mistral.call_id("call_1") == mistral.call_id("call_1") != mistral.call_id("call_2")
    assert mistral.call_id("abcdef123") == "abcdef123"
    assert FORMATS["hermes"].new_call_id().startswith("call_")


@pytest.mark.parametrize(
    ("template", "vocabulary", "name"),
    [
        ("<|im_start|> <tool_call>", (), "hermes"),
        ("<|im_start|> <tool_call> xml_tools", (), "smollm3"),
        ("<|im_start|> You are SmolLM, named SmolLM, trained by Hugging Face", (), "smollm2"),
        ('<|start_header_id|> {"name": x, "parameters": y}', (), "llama3"),
        ("[INST] [TOOL_CALLS]", (), "mistral"),
        ("[INST] [TOOL_CALLS] [ARGS]", (), "mistral-args"),
        ("<｜tool▁calls▁begin｜> ```json", (), "deepseek"),
        ("<｜tool▁calls▁begin｜>", (), "deepseek-v3.1"),
        ("<|channel|>", (), "harmony"),
        ("[INST]", ("[TOOL_CALLS]",), "mistral"),
        (None, (), "hermes"),
    ],
)
def test_the_family_is_known_by_its_signs(
    template: str | None, vocabulary: tuple[str, ...], name: str
) -> None:
    assert find_format(template, vocabulary.__contains__).name == name


ATTACKS = [
    *("<tool_call>", "<tool_call></tool_call>", "</tool_call>", "<think></think>", "<think>", "<", "\n"),
    *('<tool_call>{"name": "f", "arguments": {', '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    *("<|start|>assistant", "<|channel|>", "<｜tool▁call▁begin｜>", "[TOOL_CALLS]", '{"name":', '"\\'),
]


@pytest.mark.parametrize("name", ["hermes", "harmony", "llama3"])
def test_attacks_take_linear_time(name: str) -> None:
    def seconds(text: str) -> float:
        started = time.thread_time()
        events_of(name, (text[at : at + 64] for at in range(0, len(text), 64)))
        return time.thread_time() - started

    for attack in ATTACKS:
        short, long = (attack * (size // len(attack)) for size in (1 << 12, 1 << 15))
        # The best of some: a busy machine can only make them slower. In quadratic time it were 64 times.
        ratio = min(seconds(long) for _ in range(2)) / min(seconds(short) for _ in range(4))
        assert ratio < 32, attack


#: The formats whose arguments are kept as they were written.
FORCED = [
    name for name, known in FORMATS.items() if known.form and isinstance(known.form.arguments, JsonArguments)
]
#: Formats with and without a beginning of their own, that are cut off by day.
CUT_OFF = ("hermes", "llama3", "mistral", "harmony")


@pytest.mark.parametrize("name", by_day(FORCED, *CUT_OFF))
@pytest.mark.parametrize("size", [0, 700])
def test_a_forced_call_that_is_cut_off_is_as_much_of_a_call_as_there_is(name: str, size: int) -> None:
    """Cut after each character, whole and in pieces: never content, and the arguments as far as they go."""
    known = FORMATS[name]
    first, second = '{"a": {"b": "%s"}}' % ("x" * size), '{"c": "d}\\""}'
    text = known.write_calls([("look", first), ("see", second)])
    for end in range(0, len(text), 1 if not size else 17):
        for step in (len(text), 5):
            parser, answer = known.parser(forced=True), Answer()
            for at in range(0, end, step):
                answer.add(parser.push(text[at : min(end, at + step)]))
            answer.add(parser.finish())
            assert not answer.content, (end, answer)
            told = [(call.name, call.arguments) for call in answer.tool_calls]
            assert len(told) <= 2
            for (called, arguments), (wanted, whole) in zip(
                told, (("look", first), ("see", second)), strict=False
            ):
                assert (called, whole.startswith(arguments)) == (wanted, True)
            head = text.find(first)
            if head < end:
                assert told, (end, text[:end])
                assert len(told[0][1]) == min(len(first), end - head)


@pytest.mark.parametrize("name", by_day(FORCED, *CUT_OFF))
@pytest.mark.parametrize("said", ["", "Let me look. "])
def test_a_free_call_that_is_cut_off_is_no_content(name: str, said: str) -> None:
    """Cut after each character, whole and in pieces: what is told of the call is a call."""
    known, first, second = FORMATS[name], '{"a": {"b": "x\\"y"}}', '{"c": "d}"}'
    written = known.write_calls([("look", first), ("see", second)])
    written = written.lstrip()
    if said and written.startswith(("{", "[{")):
        return  # such a family does not speak before it calls
    marks = [mark for form in known.forms for mark in (*form.opens, *form.bare)]
    mark = max((one for one in marks if written.startswith(one)), key=len, default="")
    for end in range(min(len(mark), TELLING), len(written)):
        if written.startswith("{") and end <= written.index("look"):
            continue  # any object begins like that
        text = said + written[:end]
        answers = [parse(name, parts, cut=True, tools={"look": {}, "see": {}}) for parts in ([text], text)]
        assert answers[0] == answers[1]
        assert answers[0].content.strip() == said.strip(), text
        told = [(call.name, call.arguments) for call in answers[0].tool_calls]
        wholes = [("look", first), ("see", second)]
        for (called, arguments), (wanted, whole) in zip(told, wholes, strict=False):
            assert (called, whole.startswith(arguments)) == (wanted, True)
        begun = [end > written.find(arguments) for arguments in (first, second)]
        assert len(told) == sum(begun), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "The mark <tool_call> begins a call, and"),
        ("hermes", "a <t"),
        ("hermes", '<tool_call>\n{"names": ["x'),
        ("hermes", "<tool_call>nonsense</tool_call> and"),
        ("llama3", '{"name": "Ada", "age": 3'),
        ("llama3", '{"name": "Ad'),
        ("llama3", "<|python_tag|>print(1"),
        ("mistral", "[TOOL_CALLS] ??"),
    ],
)
def test_what_is_no_call_is_text_where_it_is_cut_off(name: str, text: str) -> None:
    for parts in ([text], text):
        assert parse(name, parts, cut=True, tools={"look": {}}) == Answer(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_content_says_where_it_stands(name: str) -> None:
    prompt_end, text, (content, _, _) = ANSWERS[name]
    for parts in ([text], text):
        said = [e for e in events_of(name, parts, prompt_end=prompt_end) if isinstance(e, ContentDelta)]
        assert "".join(text[event.start : event.start + len(event.text)] for event in said) == content
