# SPDX-License-Identifier: Apache-2.0
"""Declarations of chat formats in files: what they give, and which key an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.formats import FORMATS, named_format

FORM = """
[[forms]]
head = '<use tool="NAME">'
tail = "</use>"
opens = ["<use tool="]
"""
ACME = f'name = "acme"\n{FORM}'
#: Its `reads` wants the mark before all calls before each of them.
WRAPPED = (
    ACME.replace('["<use tool="]', '["<calls>"]')
    + """
begin = "<calls>"
end = "</calls>"
closes = ["</calls>"]
reads = '<calls> <use tool="NAME">'
"""
)


def declared(folder: Path, text: str) -> ChatFormat:
    file = folder / "family.toml"
    file.write_text(text, encoding="utf-8")
    return named_format(str(file))


def test_what_is_not_declared_is_as_in_known_families(tmp_path: Path) -> None:
    known = declared(tmp_path, ACME)
    assert known.reasoning == FORMATS["hermes"].reasoning
    assert known.preamble == FORMATS["hermes"].preamble
    assert known.write_calls([("look", '{"a": 1}')]) == '<use tool="look">{"a": 1}</use>'


def test_a_family_like_another_differs_in_its_own_keys(tmp_path: Path) -> None:
    known = declared(tmp_path, 'name = "acme"\nlike = "mistral-args"\nreasoning = false\n')
    base = FORMATS["mistral-args"]
    assert (known.name, known.reasoning) == ("acme", None)
    assert (known.forms, known.call_id_length) == (base.forms, 9)


def test_a_form_like_that_of_a_family_differs_in_its_own_keys(tmp_path: Path) -> None:
    text = (
        'name = "acme"\n[[forms]]\nlike = "smollm2"\nbegin = "<calls>["\nend = "]</calls>"\n'
        "opens = ['<calls>']\ncloses = ['</calls>']\n[[forms]]\nlike = 'gigachat3'\nopens = ['call:']\n"
    )
    known = declared(tmp_path, text)
    call = '{"name": "look", "arguments": {"a": 1}}'
    assert known.write_calls([("look", '{"a": 1}')]) == f"<calls>[{call}]</calls>"
    for written in (f"<calls>[{call}]</calls>", f"call:{call}"):
        parser = known.parser()
        answer = Answer.of([*parser.push(written), *parser.finish()])
        assert [(read.name, read.arguments) for read in answer.tool_calls] == [("look", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name = ", "Invalid value"),
        ("", "name: is missing"),
        ('name = "hermes"', "name: 'hermes' is a known format's name"),
        ("name = 3", "name: must be a text, not 3"),
        (f'{ACME}reads_end = "x"', r"forms\[0\].reads_end: is no key here; known are arguments, bare"),
        ('name = "acme"\nis_known = true', "is_known: is no key here"),
        ('name = "acme"\nlike = "acme"', "like: must name a known family .*not 'acme'"),
        ('name = "acme"\n[[forms]]\nlike = "plain"', r"forms\[0\].like: must name a known family"),
        ('name = "acme"\nforms = ["x"]', r"forms\[0\]: must be a table of keys"),
        ('name = "acme"\nforms = "x"', "forms: must be a list"),
        ('name = "acme"\nreasoning = "<think>"', "reasoning: must be a table of keys"),
        ('name = "acme"\nreasoning = {closes = ["x"]}', "reasoning.opens: is missing"),
        ('name = "acme"\nreasoning = {opens = []}', "reasoning.opens: must name a mark"),
        ('name = "acme"\ndropped = [""]', "dropped: must hold no empty text"),
        ('name = "acme"\ndropped = [1]', r"dropped\[0\]: must be a text"),
        ('name = "acme"\nnumbers_ids = 1', "numbers_ids: must be true or false"),
        ('name = "acme"\ncall_id_length = -1', "call_id_length: must be an integer of at least 0"),
        (ACME.replace("NAME", "name"), r"forms\[0\].head: must hold NAME"),
        (ACME.replace('"<use tool="', ""), r"forms\[0\].opens: must name a mark"),
        (f'{ACME}id_pattern = "["', r"forms\[0\].id_pattern: is no regular expression"),
        (f'{ACME}arguments = {{notation = "member"}}\nreads = "NAME"', r"forms\[0\].reads: has no effect"),
        (
            f'{ACME}arguments = {{notation = "xml"}}',
            r"forms\[0\].arguments.notation: must be one of json, member, tags",
        ),
        (
            f'{ACME}arguments = {{notation = "tags", key = "<a>", end = "</a>"}}',
            "arguments.key: must be a mark",
        ),
        (
            f'{ACME}arguments = {{notation = "tags", key = "<a KEY KIND>", end = "</a>"}}',
            "arguments.kinds: must be given where",
        ),
        (
            f'{ACME}arguments = {{notation = "literals", constants = ["yes"]}}',
            "arguments.constants: must be a list of 3 texts",
        ),
        (f'{ACME}reads = "<uses> NAME"', r"forms\[0\]: 1 call\(s\) are written as .* not read"),
        (WRAPPED, r"forms\[0\]: 2 call\(s\) are written as .* not read"),
    ],
)
def test_an_error_names_the_file_and_the_key(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"family\.toml: .*{error}"):
        declared(tmp_path, text)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        named_format(str(tmp_path / "missing.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.toml: "):
        named_format(str(tmp_path / "folder.toml"))
