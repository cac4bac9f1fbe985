# SPDX-License-Identifier: Apache-2.0
r"""Lark grammars of texts that are written inside of JSON strings.

`escape_lark` makes of a grammar another one, of the same texts with `"`, `\` and control characters escaped
as JSON wants it. Each character has one spelling, and none begins another, so it suffices to rewrite the
characters and classes of strings and regular expressions (`escaped_regex`): sequences, choices, repetitions,
`&`, and where a lexeme ends (`escaped_lexemes`) stay the same. The rest is copied unchanged, on its
own lines, so that the line numbers of a compiler's errors are right.
"""

from __future__ import annotations

import json
import re

from radixkv.grammar.escaped_lexemes import split_lexemes
from radixkv.grammar.escaped_regex import escape_char, escape_regex, escaped_literal, escaped_range

#: Of a grammar: it is rewritten while others wait.
MAX_CHARS = 16 * 1024

#: What `%import common.NAME` gives.
_COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": r"[eE][+-]?[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_FLOAT": r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}

_STRING = r'"(?:\\.|[^"\\\n])*"'
_ATTRIBUTES = rf'\[(?:{_STRING}|/(?:\\.|[^/\\\n])+/|[^\]\n"/])*\]'
_PARTS = re.compile(
    rf"(?m:^)(?P<begin>[ \t]*[?!]?(?P<name>[A-Za-z_]\w*))[ \t]*(?P<attributes>{_ATTRIBUTES})?[ \t]*:(?!:)"
    r"|(?P<ignore>%ignore\b)|(?P<alias>->[ \t]*\w+)"
    rf"|(?P<first>{_STRING})[ \t]*\.\.[ \t]*(?P<last>{_STRING})"
    rf"|(?P<string>{_STRING})(?P<case>i?)"
    r"|(?P<comment>//[^\n]*|\#[^\n]*)"
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)"
    r"|%import[ \t]+(?P<import>[^\n]*)"
    r"|(?P<directive>%(?:json|lark|regex|llguidance))\b"
    r"|(?P<token><[^>\n]{0,200}>)"
    r"|(?P<not>~)|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<brace>[{}])|(?P<open>[\"/])"
)
#: A terminal that is a regular expression, perhaps with strings before it.
_SIMPLE = re.compile(
    rf"(?m:^)[ \t]*(?P<name>_?[A-Z]\w*)[ \t]*:(?P<before>(?:[ \t]*{_STRING})*)[ \t]*"
    r"/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)[ \t]*(?://[^\n]*|\#[^\n]*)?$(?!\s*[|&])"
)
_ONE_IMPORT = re.compile(r"common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*(?://.*|#.*)?")
_IMPORTS = re.compile(r"common[ \t]*\(([\w \t,]*)\)[ \t]*(?://.*|#.*)?")


def escape_lark(grammar: str) -> str:
    r"""Return a grammar of JSON strings, between their quotes, whose value is a text of `grammar`.

    >>> print(escape_lark('start: "a" "\\"" /[a-z]/'))
    start: "a" "\\\"" /[a-z]/

    Raises:
        ValueError: something of it has no such form.
    """
    if len(grammar) > MAX_CHARS:
        raise ValueError(f"it has {len(grammar)} characters, but at most {MAX_CHARS} are allowed")
    return _Rewriting(grammar).result()


#: Sources of a regular expression.
_RULE, _LEXEME, _IGNORED = "rule", "lexeme", "ignored"


class _Rewriting:
    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._added: dict[str, str] = {}
        self._depth = 0
        self._has_start = False
        self._inside = _LEXEME
        self._rules: dict[str, str] = {}  # terminal -> the rule that stands for it in rules

    def result(self) -> str:
        for part in _PARTS.finditer(self._grammar):
            if part["open"] is not None:
                raise ValueError(f"line {self._line(part)}: there is a {part[0]} without another one")
            if part["import"] is not None:
                self._import(part)
        for found in _SIMPLE.finditer(self._grammar):
            self._add_rule(found["name"], found["before"], found["regex"], found["flags"])
        written = _PARTS.sub(self._part, self._grammar)
        if self._depth:
            raise ValueError("a brace is not closed")
        if not self._has_start:
            raise ValueError("there is no rule 'start', which a grammar begins with")
        return "\n".join([written, *self._added.values()])

    def _add_rule(self, name: str, before: str, regex: str, flags: str) -> None:
        body = split_lexemes(regex, flags)
        if body is not None:
            rule = f"text_{len(self._rules)}_{name.lower()}"
            self._rules[name] = rule
            self._added[rule] = f"{rule}: {_PARTS.sub(self._part, before)} {body}"

    def _import(self, part: re.Match[str]) -> None:
        try:
            for name, alias in _imports(part["import"]):
                if name not in _COMMON:
                    raise ValueError(f"%import: common has no {name!r}; it has {', '.join(_COMMON)}")
                self._added[alias] = f"{alias}: /{escape_regex(_COMMON[name], '')}/"
                if name == "NEWLINE":
                    self._rules[alias] = rule = f"text_{len(self._rules)}_newline"
                    self._added[rule] = rule + r": (/\\r\\n/ | /\\n/)+"
                else:
                    self._add_rule(alias, "", _COMMON[name], "")
        except ValueError as error:
            raise ValueError(f"line {self._line(part)}: {error}") from None

    def _part(self, part: re.Match[str]) -> str:
        if part["begin"] is not None:
            self._inside = _LEXEME
            self._has_start |= part["name"] == "start"
            attributes = _PARTS.sub(self._part, part["attributes"] or "")
            if not attributes and part["name"].lstrip("_")[:1].islower():
                self._inside = _RULE
            return f"{part['begin']}{attributes}:"
        if part["ignore"] is not None:
            self._inside = _IGNORED
            return part[0]
        if part["word"] is not None:
            return self._rules.get(part[0], part[0]) if self._inside == _RULE else part[0]
        if part["comment"] is not None or part["import"] is not None:
            return ""
        if part["alias"] is not None:
            return part[0]
        if part["brace"] is not None:
            self._depth += 1 if part[0] == "{" else -1
            if self._depth < 0:
                raise ValueError(f"line {self._line(part)}: there is a '}}' without its '{{'")
            return part[0]
        try:
            return self._rewritten(part)
        except ValueError as error:
            raise ValueError(f"line {self._line(part)}: {error}") from None

    def _rewritten(self, part: re.Match[str]) -> str:
        if part["first"] is not None:
            first, last = _text(part["first"]), _text(part["last"])
            if len(first) != 1 or len(last) != 1 or first > last:
                raise ValueError(f"{part[0]} is no range of characters")
            return f"/{escaped_range(first, last)}/"
        if part["string"] is not None:
            return _string(_text(part["string"]), ignores_case=bool(part["case"]))
        if part["regex"] is not None:
            regex, flags = part["regex"], part["flags"]
            split = None
            if self._inside != _LEXEME:
                split = split_lexemes(regex, flags, is_ignored=self._inside == _IGNORED)
            return split or f"/{escape_regex(regex, flags)}/{flags}"
        if part["not"] is not None:
            # The complement of escaped texts includes texts that are not escaped.
            raise ValueError(
                "~ can't be used in a grammar of an argument of a call; say what the text may be"
            )
        raise ValueError(f"{part[0][:40]} can't stand in a grammar of a text that is an argument of a call")

    def _line(self, part: re.Match[str]) -> int:
        return self._grammar.count("\n", 0, part.start()) + 1


def _imports(text: str) -> list[tuple[str, str]]:
    """Names in `common`, and their names here."""
    one = _ONE_IMPORT.fullmatch(text.strip())
    if one is not None:
        return [(one[1], one[2] or one[1])]
    several = _IMPORTS.fullmatch(text.strip())
    if several is None:
        raise ValueError("%import: write %import common.NAME; there is no other module")
    return [(name, name) for name in several[1].replace(",", " ").split()]


def _text(string: str) -> str:
    try:
        value = json.loads(string, strict=False)
    except ValueError:
        raise ValueError(f"the string {string[:40]} has an escape that is none of JSON's") from None
    assert isinstance(value, str)
    return value


def _string(text: str, *, ignores_case: bool) -> str:
    escaped = "".join(map(escape_char, text))
    if not ignores_case:
        return json.dumps(escaped, ensure_ascii=False)
    if escaped == text:
        return json.dumps(text, ensure_ascii=False) + "i"
    return "/" + "".join(escaped_literal(c, re.escape(c)) for c in text).replace("/", r"\/") + "/i"
