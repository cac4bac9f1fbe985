# SPDX-License-Identifier: Apache-2.0
"""Lark grammars of escaped texts: they accept the escaped form of just what the grammar itself accepts."""

from __future__ import annotations

import functools
import json
import random
import re

import pytest
from llguidance import LLMatcher
from patch_grammar import PATCH
from scripted_engine import ByteTokenizer

from radixkv.grammar.escaped_lark import escape_lark
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs

END = 257
GRAMMARS = [
    PATCH,
    'start: "a\\"b" | "\\\\" | "\\n" "i\\tN"i | ""',
    r"start: /./",
    r"start: /./s",
    r"start: /(?s).(?-s:.)./",
    r"start: /[^a]+/",
    r"start: /[^\n\"\\]{1,3}/",
    r"start: /[[:cntrl:]\p{P}]+|\PL\s/",
    r"start: /[\s--\n]|[\x00-~&&[^a-z]]{2}|[]\-^]+|[^]a]/",
    r"start: /\S\W\D|\x22\u005c\x{a}/",
    r"start: /(?i:a\nb[\n\t])|n\nN/i",
    'start: "\\n".."\\u0020" | "!".."]"',
    "start: C\nC: A & B\nA: /[^b]*/\nB: /.\\n.*/",
    "start: x{1,3}\nx: ESCAPED_STRING | NL\n%import common.LF -> NL\n%import common (ESCAPED_STRING, INT)",
    'start: "a" "b" // says "so}"\n%ignore /[ \\n]+/  # and /this/',
    'start: x "!"\nx[lazy]: /[^!]*"/',
    'start: x\nx[stop="\\n"]: /(?s:.)*/ ',
    "start: C\n%import common.C_COMMENT -> C",
    'start: TEXT "\\""\nTEXT: /(?:[^"\\\\]|é)*/',
    'start: x+\nx: "a" | "\\""\n%ignore WS\n%import common.WS',
    'start: x+\nx: "a" | "\\""\n%ignore /\\s+/',
    'start: LINE* "!"\nLINE: "-" /.*/ "\\n"',
    'start: L nl\nL: "a" /(?s:.){0,2}/i\nnl[lazy]: /.*\\n/',
    "start: /a(?s).*/ | /[^\\n]{2,}/ | /(.|\\n){2}/ | /\\n*/",
]
TEXTS = [
    *(
        "",
        "a",
        'a"b',
        "\\",
        "\n",
        "\nI\tn",
        "\nI\tN",
        "N\nN",
        "n\nn",
        "a\nB\n",
        "a b",
        "a\n b\n",
        "\x00",
        "\x1b",
    ),
    *('"', '""', '"a\\"b"', '\n"x"\n', "!", "]", "é\n", "aé", '"\\\n', "a\na\n", "aa\n\n", '/* a\n"b" */'),
    *(
        'a"!',
        'x"y"!',
        "\t",
        "\r\n",
        "😀",
        "ab",
        "/",
        "a/b",
        "\x7f",
        "^-]",
        " \x85",
        "\\\\",
        "\x0b",
        "b\n",
        "\nb",
    ),
    '*** Begin Patch\n*** Add File: a"b.py\n+print("\\n é")\n*** End Patch\n',
    "*** Begin Patch\n*** Update File: x\n@@ def f():\n-\told\\\n+\tnew 😀\n*** End of File\n*** End Patch",
    "*** Begin Patch\n*** Delete File: x\n*** End Patch",
    "*** Begin Patch\n*** Delete File: \n*** End Patch",
    "*** Begin Patch\n*** End Patch",
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(ByteTokenizer(), {END})


@functools.cache
def compiled(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    matcher = vocabulary.matcher(StructuredOutputs(grammar=grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    matcher = compiled(vocabulary, grammar).deep_copy()
    data = list(text.encode())
    if matcher.try_consume_tokens(data) < len(data):
        return False
    return bool(matcher.is_accepting())


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def embedded(grammar: str) -> str:
    """As an answer has it: between quotes, in a grammar of another's."""
    return f'start: "<" inner "\\""\ninner: %lark {{\n{escape_lark(grammar)}\n}}\nLF: "z"'


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_the_escaped_form_of_what_a_grammar_accepts_is_accepted(vocabulary: Vocabulary, grammar: str) -> None:
    chosen = random.Random(3)
    letters = 'ab"\\\n\té!\x1b /nN'
    texts = [*TEXTS, *("".join(chosen.choices(letters, k=chosen.randint(1, 4))) for _ in range(300))]
    inner = embedded(grammar)
    told = {text: accepts(vocabulary, grammar, text) for text in texts}
    assert any(told.values())
    for text, is_text in told.items():
        assert accepts(vocabulary, inner, f'<{escaped(text)}"') == is_text, text


def test_newlines_end_before_another_escape(vocabulary: Vocabulary) -> None:
    grammar = embedded('start: NEWLINE "a" NEWLINE "\\\\"\n%import common.NEWLINE')
    assert accepts(vocabulary, grammar, r'<\n\na\r\n\n\\"')
    assert not accepts(vocabulary, grammar, r'<\n\ra\n\\"')


@pytest.mark.parametrize("raw", ['a"b', "a\nb", "\\", "\\u0061", "\\/", "\x01", "a\\N"])
def test_no_other_spelling_is_accepted(vocabulary: Vocabulary, raw: str) -> None:
    assert accepts(vocabulary, "start: /(.|\\n)*/", raw)
    assert not accepts(vocabulary, embedded("start: /(.|\\n)*/i"), f'<{raw}"')


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: "a"\n}\nx: "b"', "line 2: there is a '}'"),
        ("start: a{", "brace"),
        ("x: /a/", "start"),
        ("start: /" + "a" * 2**14 + "/", "16384"),
        ("start: %json {}", "line 1: %json"),
        ("start: <|eot|>", "<|eot|>"),
        ("start: /[a/", "not closed"),
        ("start: /a(?x: b)/", "flag x"),
        ('start: "a\\q"', "escape"),
        ("start: a\n%import common.NOPE", "NOPE"),
        ("%import python.NAME\nstart: NAME", "line 1: %import"),
        ('start: "ab".."c"', "range"),
        ("start: A\nA: ~/a/", "line 2: ~"),
    ],
)
def test_what_can_not_be_escaped_is_named(grammar: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        escape_lark(grammar)
