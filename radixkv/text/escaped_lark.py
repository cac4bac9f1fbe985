r"""Lark grammars of texts that are written inside of JSON strings.

`escape_lark` makes of a grammar another one, of the same texts with `"`, `\` and control characters escaped
as JSON wants it. Each character has one spelling, and none begins another, so it suffices to rewrite the
characters and classes of strings and regular expressions: sequences, choices, repetitions, `&`, and where a
lexeme ends stay what they are. The rest is copied as it stands, on the lines where it stood, so that what a
compiler says of it is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CONTROLS = frozenset(map(chr, range(0x20)))
_MARKS = frozenset('"\\')
_SPACES = frozenset("\t\n\v\f\r")
#: The characters that are escaped.
_ESCAPED = _CONTROLS | _MARKS
_UNESCAPED = r'[^"\\\x00-\x1f]'
_MAX_NESTING = 64
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
    r"""A grammar of what JSON strings hold, between their quotes, whose value is a text of `grammar`.

    >>> print(escape_lark('start: "a" "\\"" /[a-z]/'))
    start: "a" "\\\"" /[a-z]/

    Raises:
        ValueError: something of it has no such form.
    """
    if len(grammar) > MAX_CHARS:
        raise ValueError(f"it has {len(grammar)} characters, but at most {MAX_CHARS} are allowed")
    return _Rewriting(grammar).result()


#: What a regular expression is part of.
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
        body = _split(regex, flags)
        if body is not None:
            rule = f"text_{len(self._rules)}_{name.lower()}"
            self._rules[name] = rule
            self._added[rule] = f"{rule}: {_PARTS.sub(self._part, before)} {body}"

    def _import(self, part: re.Match[str]) -> None:
        try:
            for name, alias in _imports(part["import"]):
                if name not in _COMMON:
                    raise ValueError(f"%import: common has no {name!r}; it has {', '.join(_COMMON)}")
                self._added[alias] = f"{alias}: /{_escape_regex(_COMMON[name], '')}/"
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
            return f"/{_of_range(first, last)}/"
        if part["string"] is not None:
            return _string(_text(part["string"]), ignores_case=bool(part["case"]))
        if part["regex"] is not None:
            regex, flags = part["regex"], part["flags"]
            split = (
                _split(regex, flags, is_ignored=self._inside == _IGNORED) if self._inside != _LEXEME else None
            )
            return split or f"/{_escape_regex(regex, flags)}/{flags}"
        if part["not"] is not None:
            # The complement of what is escaped has texts that are not escaped.
            raise ValueError(
                "~ can't be used in a grammar of an argument of a call; say what the text may be"
            )
        raise ValueError(f"{part[0][:40]} can't stand in a grammar of a text that is an argument of a call")

    def _line(self, part: re.Match[str]) -> int:
        return self._grammar.count("\n", 0, part.start()) + 1


def _imports(text: str) -> list[tuple[str, str]]:
    """Names in `common`, and what they are called here."""
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
    escaped = "".join(map(_escape, text))
    if not ignores_case:
        return json.dumps(escaped, ensure_ascii=False)
    if escaped == text:
        return json.dumps(text, ensure_ascii=False) + "i"
    return "/" + "".join(_literal(c, re.escape(c)) for c in text).replace("/", r"\/") + "/i"


def _escape(char: str) -> str:
    if char not in _ESCAPED:
        return char
    return "\\" + _SHORT[char] if char in _SHORT else f"\\u{ord(char):04x}"


def _of_range(first: str, last: str) -> str:
    source = f"[\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}]"
    return _class(source, frozenset(c for c in _ESCAPED if first <= c <= last))


# ------------------------------------------------------------------ regular expressions


class _Atom(NamedTuple):
    """A character, a class, or something that matches no text (`members` None), and where it ends.

    Args:
        members: of the characters that are escaped, those that it matches.
        char: the only one that it matches.
    """

    end: int
    members: frozenset[str] | None
    char: str | None = None


_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<close>[:)])))?")
_COUNT = re.compile(r"\{[\d, ]*\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]+)\})")
_PROPERTY = re.compile(r"\\([pP])(?:\{(\^?)([^}]{0,64})\}|(\w))")
_POSIX = re.compile(r"\[:(\^?)(\w+):\]")
_CHARS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_PERL: dict[str, frozenset[str]] = {"d": frozenset(), "s": _SPACES, "w": frozenset()}
_POSIX_CLASSES = {
    "ascii": _ESCAPED,
    "blank": frozenset("\t"),
    "cntrl": _CONTROLS,
    "graph": _MARKS,
    "print": _MARKS,
    "punct": _MARKS,
    "space": _SPACES,
}
#: Properties of Unicode that some of the escaped characters have, without blanks and underscores.
_PROPERTIES = {
    **dict.fromkeys(("c", "other", "cc", "control", "cntrl"), _CONTROLS),
    **dict.fromkeys(("p", "punctuation", "punct", "po", "otherpunctuation"), _MARKS),
    **dict.fromkeys(("graphemebase", "grbase", "patternsyntax", "patsyn"), _MARKS),
    **dict.fromkeys(("whitespace", "wspace", "space", "patternwhitespace", "patws"), _SPACES),
    **dict.fromkeys(("quotationmark", "qmark"), frozenset('"')),
    **dict.fromkeys(("any", "ascii", "assigned", "common", "zyyy"), _ESCAPED),
}
_PROPERTY_KINDS = ("gc", "generalcategory", "sc", "script")


def _escape_regex(pattern: str, flags: str) -> str:
    """A pattern in the syntax of Rust's crate `regex`, of what has been escaped."""
    _check_flags(flags, "")
    dots = ["s" in flags]
    written: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "(":
            group = _GROUP.match(pattern, at)
            assert group is not None
            on, off = group["on"] or "", group["off"] or ""
            _check_flags(on, off)
            has_dots = "s" in on or (dots[-1] and "s" not in off)
            if group["close"] == ")":
                dots[-1] = has_dots
            else:
                dots.append(has_dots)
            written.append(group[0])
            at = group.end()
        elif char == ")":
            if len(dots) > 1:
                dots.pop()
            written.append(char)
            at += 1
        elif char == "{" and (count := _COUNT.match(pattern, at)) is not None:
            written.append(count[0])
            at = count.end()
        elif char in "*+?|^${":
            written.append(char)
            at += 1
        elif char == ".":
            written.append(_any_char(includes_newline=dots[-1]))
            at += 1
        else:
            atom = _bracketed(pattern, at) if char == "[" else _atom(pattern, at)
            written.append(_write(pattern[at : atom.end], atom))
            at = atom.end
    return "".join(written)


def _check_flags(on: str, off: str) -> None:
    for flag in "xR":
        if flag in on:
            raise ValueError(f"the flag {flag} of a regular expression can't be used here")
    if "u" in off:
        raise ValueError("regular expressions are of characters, not of bytes: leave (?-u) out")


def _any_char(*, includes_newline: bool) -> str:
    if includes_newline:
        return _class(r"[\x{0}-\x{10ffff}]", _ESCAPED)
    return _class(r"[^\n]", _ESCAPED - {"\n"})


def _write(source: str, atom: _Atom) -> str:
    if not atom.members:
        return source
    if atom.char is not None:
        return _literal(atom.char, source)
    return _class(source if source.startswith("[") else f"[{source}]", atom.members)


def _literal(char: str, source: str) -> str:
    return f"(?-i:{_spelled(char)})" if char in _ESCAPED else source


def _spelled(char: str) -> str:
    return _escape(char).replace("\\", "\\\\")


def _class(source: str, members: frozenset[str]) -> str:
    """A class in brackets, with the escapes of its members in place of these."""
    if not members:
        return source
    return f"(?:{'|'.join([f'[{source}&&{_UNESCAPED}]', *_escapes(members)])})"


def _escapes(members: frozenset[str]) -> list[str]:
    """Patterns of the escapes of some characters."""
    ways = []
    short = "".join(_SHORT[c].replace("\\", "\\\\") for c in sorted(members) if c in _SHORT)
    if short:
        ways.append(rf"(?-i:\\[{short}])")
    for tens in "01":
        ones = [f"{ord(c) & 15:x}" for c in sorted(members - _SHORT.keys()) if ord(c) >> 4 == int(tens)]
        if ones:
            ways.append(rf"(?-i:\\u00{tens}[{''.join(ones)}])")
    return ways


def _atom(pattern: str, at: int) -> _Atom:
    """The character or the escape at a place."""
    char = pattern[at]
    if char != "\\":
        return _one(at + 1, char)
    code = _CODE.match(pattern, at)
    if code is not None:
        number = int(next(filter(None, code.groups())), 16)
        if number > 0x10FFFF:
            raise ValueError(f"{code[0]} is no character")
        return _one(code.end(), chr(number))
    found = _PROPERTY.match(pattern, at)
    if found is not None:
        return _Atom(
            found.end(), _complement(_property(found[3] or found[4]), (found[1] == "P") ^ bool(found[2]))
        )
    escaped = pattern[at + 1 : at + 2]
    if escaped in _CHARS:
        return _one(at + 2, _CHARS[escaped])
    if escaped.lower() in _PERL:
        return _Atom(at + 2, _complement(_PERL[escaped.lower()], escaped.isupper()))
    if escaped.isalnum() or escaped in "<>":
        return _Atom(at + 2, None)  # \b and the like; what is none, the compiler refuses
    return _one(at + 2, escaped)


def _one(end: int, char: str) -> _Atom:
    return _Atom(end, frozenset(char) & _ESCAPED, char)


def _complement(members: frozenset[str], is_negated: bool) -> frozenset[str]:
    return _ESCAPED - members if is_negated else members


def _property(name: str) -> frozenset[str]:
    kind, mark, value = name.replace(":", "=").rpartition("=")
    plain = re.sub(r"[\s_-]", "", kind).lower()
    if mark and plain not in _PROPERTY_KINDS:
        raise ValueError(f"the property {name[:40]!r} of a regular expression can't be used here")
    value = re.sub(r"[\s_-]", "", value).lower()
    return _PROPERTIES.get(value.removeprefix("is") if len(value) > 4 else value, frozenset())


_OPERATORS: dict[str, Callable[[frozenset[str], frozenset[str]], frozenset[str]]] = {
    "&&": frozenset.intersection,
    "--": frozenset.difference,
    "~~": frozenset.symmetric_difference,
}


def _bracketed(pattern: str, at: int, depth: int = 1) -> _Atom:
    """The class in brackets at a place."""
    if depth > _MAX_NESTING:
        raise ValueError(f"classes are nested deeper than {_MAX_NESTING} levels")
    start, at = at, at + 1
    is_negated = pattern.startswith("^", at)
    at += is_negated
    first = at
    while pattern.startswith("-", at):
        at += 1
    at += at == first and pattern.startswith("]", at)
    left: frozenset[str] = frozenset()
    join: Callable[[frozenset[str], frozenset[str]], frozenset[str]] = frozenset.__or__
    members: frozenset[str] = frozenset()
    while at < len(pattern):
        if pattern[at] == "]":
            return _Atom(at + 1, _complement(join(left, members), is_negated))
        operator = pattern[at : at + 2]
        if operator in _OPERATORS:
            left, members = join(left, members), frozenset()
            join = _OPERATORS[operator]
            at += 2
            continue
        posix = _POSIX.match(pattern, at)
        if posix is not None:
            members |= _complement(_POSIX_CLASSES.get(posix[2], frozenset()), bool(posix[1]))
            at = posix.end()
            continue
        atom = _bracketed(pattern, at, depth + 1) if pattern[at] == "[" else _atom(pattern, at)
        at = atom.end
        if (
            atom.char is not None
            and pattern[at : at + 1] == "-"
            and pattern[at + 1 : at + 2] not in ("]", "-", "")
        ):
            last = _atom(pattern, at + 1)
            if last.char is not None:
                members |= {c for c in _ESCAPED if atom.char <= c <= last.char}
            at = last.end
        else:
            members |= atom.members or frozenset()
    raise ValueError(f"the class {pattern[start : start + 40]} of a regular expression is not closed")


# ------------------------------------------------------------------ where lexemes end

_QUANTIFIER = re.compile(r"(?P<kind>[*+?]|\{(?P<least>\d+)(?P<comma>,?)(?P<most>\d*)\})\??")
_GROUP_HEAD = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>s?):))?(?!\?)")
_MAX_COUNTED = 200
_MAX_GROUPS = 4


def _split(pattern: str, flags: str, *, is_ignored: bool = False) -> str | None:
    """A pattern that ends by repeating a class, as lexemes of one escape or of characters without any.

    A lexer sees one byte ahead. Where what may follow begins with an escape, too, it could not tell at the
    backslash whether the repetition goes on. None: the pattern does not end so, or is not simple before.

    Args:
        is_ignored: it is repeated anyway, and has to be one lexeme.
    """
    if flags.strip("is"):
        return None
    if pattern.startswith("(?s)"):
        pattern, flags = pattern[4:], flags + "s"
    for _ in range(_MAX_GROUPS):
        outer = _GROUP_HEAD.match(pattern)
        if outer is None or _group_end(pattern, 0) != len(pattern):
            break
        if outer["flags"] and "s" not in flags:
            flags += "s"
        pattern = pattern[outer.end() : -1]
    pieces = _pieces(pattern)
    if not pieces or any(quantifier or atom.startswith("(") for atom, quantifier in pieces[:-1]):
        return None
    atom, quantifier = pieces[-1]
    one = _one_char(atom, "s" in flags) if quantifier is not None else None
    if one is None or quantifier is None or not one[1]:
        return None
    source, members = one
    suffix = "i" * ("i" in flags)
    escapes = [f"/{way}/{suffix}" for way in _escapes(members)]
    head = "".join(f"{atom}" for atom, _ in pieces[:-1])
    before = f"/{_escape_regex(head, flags)}/{flags} " if head else ""
    plain = "" if len(source) == 1 else f"[{source}&&{_UNESCAPED}]"
    once = " | ".join([f"/{plain}/{suffix}", *escapes] if plain else escapes)
    often = " | ".join([f"/{plain}+/{suffix}", *escapes] if plain else escapes)
    kind = quantifier["kind"]
    if is_ignored:
        if head or kind not in "*+":
            return None
        ways = "|".join([f"{plain}+", *_escapes(members)] if plain else _escapes(members))
        return f"/{ways}/{suffix}"
    if kind in "*+":
        return f"({before}({often}){kind})"
    if kind == "?":
        return f"({before}({once})?)"
    least, most = int(quantifier["least"]), quantifier["most"]
    if max(least, int(most or 0)) > _MAX_COUNTED:
        return None
    if not quantifier["comma"]:
        return f"({before}({once}){{{least}}})"
    if most:
        return f"({before}({once}){{{least},{most}}})"
    return f"({before}({once}){{{least}}} ({often})*)" if least else f"({before}({often})*)"


def _group_end(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char in "()":
            depth += 1 if char == "(" else -1
            at += 1
            if depth == 0:
                return at
        else:
            at = (_bracketed(pattern, at) if char == "[" else _atom(pattern, at)).end
    raise ValueError("a group of a regular expression is not closed")


def _pieces(pattern: str) -> list[tuple[str, re.Match[str] | None]] | None:
    """Characters, classes and groups in sequence, each with how often it comes; None: there is more to it."""
    pieces = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char in "|)*+?{^$":
            return None
        if char == "(":
            end = _group_end(pattern, at)
        else:
            end = (_bracketed(pattern, at) if char == "[" else _atom(pattern, at)).end
        quantifier = _QUANTIFIER.match(pattern, end)
        pieces.append((pattern[at:end], quantifier))
        at = end if quantifier is None else quantifier.end()
    return pieces


def _one_char(atom: str, has_dots: bool, depth: int = 0) -> tuple[str, frozenset[str]] | None:
    """What matches just one character, as a class or an escaped character, and its escaped members."""
    if atom.startswith("("):
        head = _GROUP_HEAD.match(atom)
        if head is None or depth == _MAX_GROUPS:
            return None
        found = []
        for way in _ways(atom[head.end() : -1]):
            pieces = _pieces(way)
            if pieces is None or len(pieces) != 1 or pieces[0][1] is not None:
                return None
            found.append(_one_char(pieces[0][0], has_dots or bool(head["flags"]), depth + 1))
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        sources = (source if len(source) > 1 else f"\\x{{{ord(source):x}}}" for source, _ in known)
        return f"[{''.join(sources)}]", frozenset().union(*(members for _, members in known))
    if atom == ".":
        return (r"[\x{0}-\x{10ffff}]", _ESCAPED) if has_dots else (r"[^\n]", _ESCAPED - {"\n"})
    if atom.startswith("["):
        return atom, _bracketed(atom, 0).members or frozenset()
    one = _atom(atom, 0)
    if one.members is None:
        return None
    return (one.char, one.members) if one.char is not None else (f"[{atom}]", one.members)


def _ways(pattern: str) -> list[str]:
    """The alternatives of a pattern."""
    ways, start, at = [], 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "|":
            ways.append(pattern[start:at])
            start = at = at + 1
        elif char == "(":
            at = _group_end(pattern, at)
        else:
            at = (_bracketed(pattern, at) if char == "[" else _atom(pattern, at)).end
    return [*ways, pattern[start:]]
