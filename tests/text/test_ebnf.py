# SPDX-License-Identifier: Apache-2.0
"""EBNF as Lark: the same texts match, and what can't be translated is refused with its place."""

from __future__ import annotations

import re

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import tried
from scripted_engine import ByteTokenizer

from radixkv.errors import InvalidRequestError
from radixkv.grammar.ebnf import MAX_EBNF_BYTES, is_ebnf, lark_of_ebnf
from radixkv.grammar.limits import check_lark

TOKENS = llguidance.LLTokenizer(ByteTokenizer())
ARITHMETIC = """
# sums
root ::= expr
expr ::= term ("+" term)*  # and more
   | "-" expr
term ::= num | "(" expr ")"
num  ::= [0-9]+
"""
JSON = r"""
root ::= ws value ws
value ::= object | array | string | number | "true" | "null"
object ::= "{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}"
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)?
ws ::= [ \t\n]*
"""


def matches(grammar: str, text: str) -> bool:
    lark = lark_of_ebnf(grammar)
    check_lark(lark)
    matcher = llguidance.LLMatcher(TOKENS, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), (lark, matcher.get_error())
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "Hello" | "Hi"', ["Hello", "Hi"], ["He", "Hey", ""]),
        ('root::=a b\na::="1"\nb ::= "2" |\n "3"', ["12", "13"], ["1", "123"]),
        ('root ::= [a-z]* "abc"', ["abc", "xabc", "abcabc"], ["ab", "abcx"]),
        ('root ::= "(" root ")" | [a-z]* "abc"', ["abc", "(abc)", "((xabc))"], ["(abc", "ab"]),
        ('root ::= ("a" | "ab") "bc" ("(" root ")")?', ["abc", "abbc", "abc(abc)"], ["ab"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a"*', ["", "aaa"], ["b"]),
        ('root ::= "a" root | ""', ["", "aaa"], ["b"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["ab"]),
        (r'root ::= [^"\\]+ "é\n\u00e9\x41\U0001F600"', ["abcé\néA\U0001f600"], ['"é']),
        (r"root ::= [\-a-c\]]{2,3}", ["-a]", "-a"], ["-", "d-"]),
        ("root ::= [a-]{1} [^]", ["-x", "a\n"], ["b"]),
        ('root ::= . "x"{,2}', ["éx", "\n"], ["xxxx", ""]),
        ('root ::= "x"{3} "y"{2,}', ["xxxyy", "xxxyyyy"], ["xxyy", "xxxy"]),
        ('root ::= my-rule.1 Other_2\nmy-rule.1 ::= "a"\nOther_2 ::= "b"\nnever ::= "c"', ["ab"], ["abc"]),
        ('root ::= "start: x" | "a::=b"', ["start: x", "a::=b"], [""]),
        (ARITHMETIC, ["1+2", "(1+22)+3", "--1"], ["1+", "()", "1-2"]),
        (JSON, ['{"a": [1, 22.5, {"b": null}]} ', "[]", '"\\n/"'], ['{"a" 1}', "[1,]", "tru"]),
    ],
)
def test_the_same_texts_match(grammar: str, good: list[str], bad: list[str]) -> None:
    assert is_ebnf(grammar)
    for text in good:
        assert matches(grammar, text), (text, lark_of_ebnf(grammar))
    for text in bad:
        assert not matches(grammar, text), (text, lark_of_ebnf(grammar))


def expressions(*atoms: str) -> st.SearchStrategy[str]:
    return st.recursive(
        st.sampled_from(atoms),
        lambda inner: (
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]} {pair[1]})")
            | st.tuples(inner, inner).map(lambda pair: f"({pair[0]} | {pair[1]})")
            | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            )
        ),
        max_leaves=5,
    )


def as_regex(expression: str) -> str:
    return re.sub(r'"(\w*)"', r"(?:\1)", expression).replace(" ", "")


samples = st.lists(st.text("ab", max_size=5), min_size=1, max_size=4)


@settings(max_examples=tried(60), deadline=None)
@given(expressions('"a"', '"ab"', '""', "[ab]", "[^a]", "."), samples)
def test_random_expressions_match_as_regular_expressions_do(expression: str, texts: list[str]) -> None:
    for text in texts:
        expected = re.fullmatch(as_regex(expression), text, re.DOTALL) is not None
        assert matches(f"root ::= {expression}", text) == expected


@settings(max_examples=tried(60), deadline=None)
@given(expressions('"a"', '"ab"', '""', "[ab]"), samples)
def test_so_they_do_within_brackets(expression: str, texts: list[str]) -> None:
    grammar = f'root ::= {expression} | "(" root ")"'
    for text in texts:
        expected = re.fullmatch(as_regex(expression), text) is not None
        assert matches(grammar, text) == matches(grammar, f"(({text}))") == expected
        assert not matches(grammar, f"({text}")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("", "no rule 'root'"),
        ('rule ::= "a"', "no rule 'root'"),
        ('start: "a"', "line 1, column 6"),
        ("root ::= other", "line 1, column 10: there is no rule 'other'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is there twice"),
        ('root ::= "a', "does not end in its line"),
        ("root ::= [a", "does not end in its line"),
        ("root ::= []", "needs a character"),
        ("root ::= [z-a]", "has no characters"),
        ('root ::= "a\\q"', "escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "\\U00110000"', "no character"),
        ('root ::= ("a"', "expected )"),
        ('root ::= "a")', "line 1, column 13"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"{3,2}', "below"),
        ('root ::= "a"{}', "bound"),
        ('root ::= "a"{x}', "bound"),
        ('root ::= "a"{100001}', "repetitions"),
        ('root ::= "a" (= "b")', "lookahead"),
        ('root ::= TagDispatch(("x", root))', "TagDispatch"),
        ("root ::= <[1000]> | <think>", "tokens by their name"),
        ("root ::= !<think>", "tokens by their name"),
        ('root ::= "a" ; "b"', "';'"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested deeper"),
        ('root ::= "a"' + "*" * 30_000, "repetitions of the same thing"),
        ('root ::= "' + "a" * MAX_EBNF_BYTES + '"', "bytes"),
    ],
)
def test_what_can_not_be_translated_is_refused(grammar: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as refused:
        lark_of_ebnf(grammar)
    assert refused.value.param == "structured"
    assert len(str(refused.value)) < 300


def test_lark_is_told_apart() -> None:
    assert not is_ebnf('start: "a" | rule\nrule: /[a-z]+/')
    assert not is_ebnf('start: "x ::= y"')
    assert is_ebnf('# comment\n  root ::= "a"')
