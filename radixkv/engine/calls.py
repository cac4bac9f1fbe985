# SPDX-License-Identifier: Apache-2.0
"""Calls: methods that are declared once, by signature and docstring, for objects that may be elsewhere.

Three classes are tables of them: `EngineClient`, `CacheClient` and `Adapters`. A declared method goes to
`perform` of its object, which knows the way: over a connection to another process, or to several objects
whose answers become one. An object in this process overrides the method with what it does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

#: How a call gives its result: to `await`, to `async for`, or after blocking the caller's thread.
Manner = Literal["awaited", "streamed", "blocking"]


def no_answer(answers: list[None]) -> None:
    """Return nothing: the call has no result."""


def answer_of_most(answers: list[T]) -> T:
    """Return the only answer: as `merge`, it makes the cache with most of the prompt the only one asked."""
    (answer,) = answers
    return answer


@dataclass(frozen=True, slots=True)
class Call:
    """A row in a table of calls.

    Attributes:
        name: name of the method.
        signature: its parameters, without `self`.
        manner: how its result is given.
        merge: makes one answer of several objects' answers; None: whoever stands for several objects
            overrides the method.
        divided: names of integer arguments that bound the whole answer; each of several objects is given
            an equal part of them, at least 1.
    """

    name: str
    signature: inspect.Signature
    manner: Manner
    merge: Callable[[list[Any]], Any] | None = None
    divided: tuple[str, ...] = ()


def call(
    *,
    merge: Callable[[list[Any]], Any] | None = None,
    divided: tuple[str, ...] = (),
    blocking: bool = False,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declare a method without a body as a call: it returns `self.perform(call, args, options)`.

    Coroutine functions become calls that are awaited, others calls that yield items or, with `blocking`, that
    block the caller's thread. `merge` and `divided` are `Call`'s.
    """

    def declare(method: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(method)
        own = signature.replace(parameters=list(signature.parameters.values())[1:])
        is_awaited = inspect.iscoroutinefunction(method)
        manner: Manner = "awaited" if is_awaited else "blocking" if blocking else "streamed"
        row = Call(method.__name__, own, manner, merge, divided)

        async def wait(self: Any, *args: Any, **options: Any) -> Any:
            return await self.perform(row, args, options)

        def give(self: Any, *args: Any, **options: Any) -> Any:
            return self.perform(row, args, options)

        declared: Any = functools.wraps(method)(wait if is_awaited else give)
        declared.call = row
        return cast(Callable[P, T], declared)

    return declare


def calls_of(table: type) -> dict[str, Call]:
    """Return the calls that a class declares, by name."""
    return {name: method.call for name, method in vars(table).items() if hasattr(method, "call")}
