# SPDX-License-Identifier: Apache-2.0
"""Values of calls as bytes: JSON, in which whatever JSON does not have is marked.

Reading them runs nothing of the sender's choice, as reading a pickle would. It makes plain values, arrays and
instances of those classes of `radixkv` that are data.

| value | written as |
| --- | --- |
| None, a boolean, a number, a string; a list | itself |
| a tuple, a set, a frozen set | `{"t": items}`, `{"s": items}`, `{"f": items}` |
| a mapping | `{"m": [[key, value], ...]}` |
| bytes | `{"b": base64}` |
| an array of numbers | `{"a": [dtype, shape, base64]}` |
| encoded token ids | `{"k": base64}` |
| a data class or named tuple | `{"d": ["module:name", the constructor's arguments, ...]}` |
| a member of an enumeration | `{"e": ["module:name", value]}` |
| an error of `radixkv.errors`, or of Python's own | `{"x": ["module:name", arguments, attributes]}` |

Other sequences arrive as lists, other mappings as dictionaries, and tensors as arrays.
"""

from __future__ import annotations

import binascii
import builtins
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np

from radixkv import errors
from radixkv.cache.keys import EncodedTokens
from radixkv.channel import ChannelEnded
from radixkv.errors import InvalidRequestError, RadixKVError

_ATOMS = frozenset((type(None), bool, int, float, str))
_NUMBERS = "biuf"  # kinds of arrays
_OUR_PACKAGE = "radixkv."


class UnreadableMessage(ChannelEnded):
    """The other end has sent bytes that no process of ours writes."""


def dumps(value: Any) -> bytes:
    """Return a value as bytes. O(value).

    Raises:
        InvalidRequestError: something in it is no data.
    """
    try:
        text = json.dumps(_plain(value), ensure_ascii=False, check_circular=False, separators=(",", ":"))
        return text.encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"this can't be sent to another process: {error}") from error


def loads(data: bytes) -> Any:
    """Return the value of `dumps`.

    Raises:
        UnreadableMessage: it is none, or one of a version with other classes.
    """
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"), object_hook=_value)
    except Exception as error:  # constructors check what they are given
        raise UnreadableMessage(f"{type(error).__name__}: {error}") from error


def sendable(error: BaseException, stand_in: type[RadixKVError]) -> BaseException:
    """Return the error, or a `stand_in` that describes it if its type can't be sent."""
    try:
        loads(dumps(error))
    except (InvalidRequestError, UnreadableMessage):
        return stand_in(f"{type(error).__name__}: {error}")
    return error


# ---------------------------------------------------------------------- writing


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind is list:
        return _items(value)
    if kind is tuple:
        return {"t": _items(value)}
    return _writer(kind)(value)


def _items(values: Any) -> Any:
    return values if _ATOMS.issuperset(map(type, values)) else [_plain(value) for value in values]


@functools.cache
def _writer(kind: type) -> Callable[[Any], Any]:
    """Return what writes the values of a class."""
    if kind is EncodedTokens:
        return lambda value: {"k": _base64(value.data)}
    if issubclass(kind, bytes | bytearray | memoryview):
        return lambda value: {"b": _base64(value)}
    if issubclass(kind, Enum):
        name = _name(kind)
        return lambda value: {"e": [name, _plain(value.value)]}
    if issubclass(kind, BaseException):
        name = _name(kind)
        return lambda error: {"x": [name, _items(list(error.args)), _mapping(vars(error))["m"]]}
    if is_dataclass(kind):
        return _record_writer(_name(kind), [item.name for item in fields(kind) if item.init])
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        name = _name(kind)
        return lambda value: {"d": [name, *_items(list(value))]}
    if issubclass(kind, Mapping):
        return _mapping
    if issubclass(kind, set | frozenset):
        mark = "s" if issubclass(kind, set) else "f"
        return lambda value: {mark: _items(list(value))}
    if issubclass(kind, np.generic):
        return lambda value: _plain(value.item())
    if hasattr(kind, "__array__"):
        return _array
    if issubclass(kind, Sequence):  # strings of a class of their own, ranges, ...
        return (lambda value: str(value)) if issubclass(kind, str) else lambda value: _items(list(value))
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no data")


def _record_writer(name: str, names: Sequence[str]) -> Callable[[Any], Any]:
    if len(names) < 2:  # of one name, `attrgetter` gives no tuple
        return lambda value: {"d": [name, *[_plain(getattr(value, each)) for each in names]]}
    get = attrgetter(*names)
    return lambda value: {"d": [name, *_items(get(value))]}


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {"m": [[_plain(key), _plain(each)] for key, each in value.items()]}


def _array(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _NUMBERS:
        return _items(array.tolist())
    return {"a": [array.dtype.str, list(array.shape), _base64(np.ascontiguousarray(array))]}


def _base64(data: Any) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    _class(name)
    return name


# ---------------------------------------------------------------------- reading


@functools.cache
def _class(name: str) -> type:
    """Return a class that is data.

    Raises:
        TypeError: there is none of that name.
    """
    module, _, qualname = name.partition(":")
    found: Any = None
    if module in ("builtins", errors.__name__):
        found = vars(builtins if module == "builtins" else errors).get(qualname)
        is_data = isinstance(found, type) and issubclass(found, Exception)
    elif module.startswith(_OUR_PACKAGE) and not module.endswith("__main__"):
        found = vars(importlib.import_module(module)).get(qualname)
        is_data = isinstance(found, type) and (
            is_dataclass(found) or issubclass(found, Enum) or hasattr(found, "_fields")
        )
    else:
        is_data = False
    if not is_data:
        raise TypeError(f"{module}.{qualname} is no data")
    kind: type = found
    return kind


def _value(marked: dict[str, Any]) -> Any:
    ((mark, content),) = marked.items()
    return _READERS[mark](content)


def _record(content: list[Any]) -> Any:
    kind = _class(content[0])
    if not is_dataclass(kind):
        return kind(*content[1:])
    names = _init_names(kind)
    return kind(**dict(zip(names, content[1:], strict=True)))


@functools.cache
def _init_names(kind: Any) -> list[str]:
    return [item.name for item in fields(kind) if item.init]


def _error(content: list[Any]) -> BaseException:
    name, args, attributes = content
    kind = _class(name)
    assert issubclass(kind, BaseException)
    error = kind(*args)
    vars(error).update(attributes)
    return error


def _read_array(content: list[Any]) -> Any:
    dtype, shape, data = content
    if np.dtype(dtype).kind not in _NUMBERS:
        raise TypeError(f"an array of {dtype} is no data")
    return np.frombuffer(binascii.a2b_base64(data), dtype).reshape(shape)


_READERS: dict[str, Callable[[Any], Any]] = {
    "t": tuple,
    "s": set,
    "f": frozenset,
    "m": dict,
    "b": binascii.a2b_base64,
    "a": _read_array,
    "k": lambda data: EncodedTokens(binascii.a2b_base64(data)),
    "d": _record,
    "e": lambda content: _class(content[0])(content[1]),
    "x": _error,
}
