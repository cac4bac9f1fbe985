# SPDX-License-Identifier: Apache-2.0
"""Declarations of chat formats in TOML: the known families (`families.toml`), and a file of a user's own.

    name = "acme"                             Keys of a family are fields of ChatFormat,
    reasoning = {opens = ["<acme:think>"], closes = ["</acme:think>"]}

    [[forms]]                                 keys of a form are fields of CallForm,
    head = '<acme:use tool="NAME">'
    tail = "</acme:use>"
    opens = ["<acme:use"]
    arguments = {notation = "json"}           and keys of arguments are fields of their notation.

`like` names a known family that gives all that isn't declared: to a family its whole declaration, to a form
the one that it writes. `false` stands for None.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import regex

from radixkv.errors import ConfigError
from radixkv.regular_file import open_regular
from radixkv.text.chat_formats.arguments import Arguments, JsonArguments
from radixkv.text.chat_formats.calls import NAME, CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.format_parser import Section
from radixkv.text.chat_formats.literals import LiteralArguments
from radixkv.text.chat_formats.member_arguments import MemberArguments
from radixkv.text.chat_formats.tagged_arguments import KEY, KIND, ElementArguments, TaggedArguments

_Table = Mapping[str, Any]
LIKE = "like"
#: Value of `notation` -> notation of arguments.
NOTATIONS: Mapping[str, type] = {
    "json": JsonArguments,
    "member": MemberArguments,
    "tags": TaggedArguments,
    "elements": ElementArguments,
    "literals": LiteralArguments,
}
#: Fields that are found from the model, or that have one value.
_NOT_DECLARED: Mapping[type, set[str]] = {ChatFormat: {"thinking", "lead", "special_tokens", "is_known"}}
#: Fields of a form that only say how heads and tails are read.
_HEADED = ("reads", "reads_next", "reads_tail", "separators", "is_vague")
_MAX_FILE_BYTES = 1 << 20

_KNOWN: _Table = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
_TABLES: Mapping[str, _Table] = {table["name"]: table for table in _KNOWN["families"]}


def known_families() -> tuple[ChatFormat, ...]:
    """Return the families of `families.toml`, in its order."""
    return tuple(declared_format(table) for table in _TABLES.values())


def load_format(path: str | Path) -> ChatFormat:
    """Return the chat format that a file declares.

    Raises:
        ConfigError: the file can't be read, is no TOML, or declares no format; the message names the key.
    """
    try:
        with open_regular(Path(path)) as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"chat_format {path}: it has more than {_MAX_FILE_BYTES} bytes")
        table = tomllib.loads(text.decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"chat_format {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return declared_format(table)
    except WrongDeclaration as error:
        raise ConfigError(f"chat_format {path}: {error}") from None


def declared_format(table: Mapping[str, Any]) -> ChatFormat:
    """Return the chat format that a table declares, as TOML gives it.

    Raises:
        WrongDeclaration: it declares none; the message begins with the key.
    """
    if LIKE in table:
        table = {**_base(table[LIKE], LIKE), **table}
    given: dict[str, Any] = {"preamble": _KNOWN["preamble"]} if table.get("forms") else {}
    given |= {key: value for key, value in table.items() if key != LIKE}
    found: ChatFormat = _declared(ChatFormat, given, "")
    return found


class WrongDeclaration(ValueError):
    """A declaration is wrong; the message begins with the place of its mistake."""


# ---------------------------------------------------------------------- tables to declarations


def _form(table: Any, where: str) -> CallForm:
    """Return the form of calls that a table declares."""
    given = {"arguments": {"notation": "json"}, **_form_table(table, where)}
    form: CallForm = _declared(CallForm, given, where)
    if NAME not in form.head:
        raise WrongDeclaration(f"{where}.head: must hold NAME, where the function's name stands")
    if not (*form.opens, *form.bare):
        raise WrongDeclaration(f"{where}.opens: must name a mark that begins calls (or `bare` one)")
    for key in _HEADED if isinstance(form.arguments, MemberArguments) else ():
        if key in given:
            raise WrongDeclaration(
                f"{where}.{key}: has no effect with the notation `member`, which reads members in any order"
            )
    try:
        regex.compile(form.id_pattern)
    except regex.error as error:
        raise WrongDeclaration(f"{where}.id_pattern: is no regular expression: {error}") from None
    return form


def _form_table(table: Any, where: str) -> dict[str, Any]:
    """Return a form's keys, and the keys of the form that it is like."""
    given = dict(_table(table, where))
    if LIKE not in given:
        return given
    base = _base(given.pop(LIKE), f"{where}.{LIKE}")
    while "forms" not in base:
        base = _base(base.get(LIKE), f"{where}.{LIKE}")
    return {**_form_table(base["forms"][0], where), **given}


def _arguments(table: Any, where: str) -> Arguments:
    """Return the notation of arguments that a table declares."""
    given = dict(_table(table, where))
    name = given.pop("notation", None)
    if name not in NOTATIONS:
        raise WrongDeclaration(f"{where}.notation: must be one of {', '.join(NOTATIONS)}, not {name!r}")
    found: Arguments = _declared(NOTATIONS[name], given, where)
    if isinstance(found, TaggedArguments):
        begin, name, _ = found.key.partition(KEY)
        if not begin.strip() or not name:
            raise WrongDeclaration(f"{where}.key: must be a mark that holds KEY, for an argument's name")
        if bool(found.kinds) != (KIND in found.key):
            raise WrongDeclaration(f"{where}.kinds: must be given where `key` holds KIND, and only there")
    return found


def _base(name: Any, where: str) -> _Table:
    if not isinstance(name, str) or name not in _TABLES:
        known = ", ".join(sorted(_TABLES))
        raise WrongDeclaration(f"{where}: must name a known family ({known}), not {name!r}")
    return _TABLES[name]


def _table(value: Any, where: str) -> _Table:
    if not isinstance(value, dict):
        raise WrongDeclaration(f"{where}: must be a table of keys, not {value!r:.60}")
    return value


def _declared(kind: type, table: _Table, where: str) -> Any:
    """Return a dataclass whose fields a table gives."""
    known = _fields(kind)
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in known:
            raise WrongDeclaration(f"{prefix}{key}: is no key here; known are {', '.join(sorted(known))}")
    for key, (field, _) in known.items():
        if key not in table and field.default is MISSING and field.default_factory is MISSING:
            raise WrongDeclaration(f"{prefix}{key}: is missing")
    return kind(**{key: _value(known[key][1], value, f"{prefix}{key}") for key, value in table.items()})


@cache
def _fields(kind: type) -> dict[str, tuple[Field[Any], Any]]:
    """Return the fields of a dataclass that are declared, with their types."""
    hints, hidden = get_type_hints(kind), _NOT_DECLARED.get(kind, ())
    return {field.name: (field, hints[field.name]) for field in fields(kind) if field.name not in hidden}


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return the value of a field from a value of TOML, by the field's type."""
    if get_origin(hint) is UnionType:
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
        if value is False:
            return None
    for kind, read in ((CallForm, _form), (Arguments, _arguments)):
        if hint is kind:
            return read(value, where)
    if hint is Section:
        section: Section = _declared(Section, _table(value, where), where)
        if not section.opens:
            raise WrongDeclaration(f"{where}.opens: must name a mark that begins the part")
        return section
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (tuple, frozenset):
        return origin(_items(parts, value, where))
    if origin is not None:  # a mapping from texts to texts
        return {key: _value(str, item, f"{where}.{key}") for key, item in _table(value, where).items()}
    if type(value) is not hint or (hint is int and value < 0):
        expected = {str: "a text", bool: "true or false", int: "an integer of at least 0"}[hint]
        raise WrongDeclaration(f"{where}: must be {expected}, not {value!r:.60}")
    return value


def _items(parts: tuple[Any, ...], value: Any, where: str) -> list[Any]:
    """Return the items of a list of marks; an empty mark is none."""
    size = None if len(parts) == 1 or parts[-1] is Ellipsis else len(parts)
    if not isinstance(value, list) or (size is not None and len(value) != size):
        raise WrongDeclaration(
            f"{where}: must be a list{f' of {size} texts' if size else ''}, not {value!r:.60}"
        )
    if any(item == "" or item == [] for item in value):
        raise WrongDeclaration(f"{where}: must hold no empty text")
    return [_value(parts[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
