# SPDX-License-Identifier: Apache-2.0
"""Calls: methods that are declared once, by signature and docstring, for objects that may be elsewhere.

A declared method goes to `perform` of its object, which knows the way: over a connection to another process,
or to several objects whose answers become one. An object in this process overrides the method with what it
does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def answer_of_most(answers: list[T]) -> T:
    """Return the only answer: as `merge`, it makes the cache with most of the prompt the only one asked."""
    (answer,) = answers
    return answer


@dataclass(frozen=True, slots=True)
class Call:
    """A row in the table of calls.

    Attributes:
        name: name of the method.
        signature: its parameters, without `self`.
        streams: True: it yields items; False: it is awaited.
        merge: makes one answer of several objects' answers; None: whoever stands for several objects
            overrides the method.
        divided: names of integer arguments that bound the whole answer; each of several objects is given
            an equal part of them, at least 1.
    """

    name: str
    signature: inspect.Signature
    streams: bool
    merge: Callable[[list[Any]], Any] | None = None
    divided: tuple[str, ...] = ()


def call(
    *, merge: Callable[[list[Any]], Any] | None = None, divided: tuple[str, ...] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declare a method without a body as a call: it returns `self.perform(call, args, options)`.

    Coroutine functions become calls that are awaited, others calls that yield items. The arguments are
    `Call`'s.
    """

    def declare(method: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(method)
        own = signature.replace(parameters=list(signature.parameters.values())[1:])
        is_awaited = inspect.iscoroutinefunction(method)
        row = Call(method.__name__, own, not is_awaited, merge, divided)

        async def wait(self: Any, *args: Any, **options: Any) -> Any:
            return await self.perform(row, args, options)

        def read(self: Any, *args: Any, **options: Any) -> Any:
            return self.perform(row, args, options)

        return cast(Callable[P, T], functools.wraps(method)(wait if is_awaited else read))

    return declare
