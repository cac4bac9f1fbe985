# SPDX-License-Identifier: Apache-2.0
"""Results of tool calls, each beside its call: a result belongs to the call whose id it names.

Many templates write no ids, so that a model pairs calls with results by their order. Results of parallel
calls arrive in any order. They are rendered in the order of the calls:

    arrived:   call a, call b | result b, result a, user
    rendered:  call a, call b | result a, result b, user

The prompt is therefore the same in whatever order tools have finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from radixkv.errors import InvalidRequestError


def order_of_results(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> list[int]:
    """Return the order in which messages in OpenAI's form are rendered, as indices. O(messages + calls).

    Only results change places, among the places of the results between two turns with calls. A result
    without an id belongs to the first call of its name, or of any name, that has no result yet.

    Raises:
        InvalidRequestError: a result names no call, or one that has a result, or comes without the result
            of an earlier call of its turn: a model would take it for that call's.
    """
    order = list(range(len(messages)))
    waiting: dict[int, str] = {}  # number of a call without a result -> its name
    numbers: dict[Any, deque[int]] = {}  # id -> calls without a result
    first = number = 0  # of the calls whose results are being read
    results: list[tuple[int, int]] = []  # numbers of their calls, and places

    def settle() -> None:
        for place, (_, at) in zip([at for _, at in results], sorted(results), strict=True):
            order[place] = at
        last = max((call for call, _ in results), default=-1)
        for call in range(first, last):
            if call in waiting:
                _refuse(f"a call of {_shown(waiting[call])} has no result, though a later one has", param)

    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if calls and message.get("role") == "assistant":
            if results:
                settle()
                results, first = [], number
            for call in calls:
                waiting[number] = call["function"]["name"]
                numbers.setdefault(call.get("id"), deque()).append(number)
                number += 1
        elif message.get("role") == "tool":
            call_id = message.get("tool_call_id")
            if call_id:
                found = next(iter(numbers.get(call_id, ())), None)
                if found is None:
                    problem = "has more than one result" if call_id in numbers else "is of no call before it"
                    _refuse(f"the id {_shown(call_id)} {problem}", param)
                numbers[call_id].popleft()
            else:
                of_turn = [call for call in range(first, number) if call in waiting]
                named = (call for call in of_turn if waiting[call] == message.get("name"))
                found = next(named, next(iter(of_turn), number))
            waiting.pop(found, None)
            results.append((found, at))
    settle()
    return order


def _shown(name: Any) -> str:
    return repr(str(name)[:64])


def _refuse(problem: str, param: str) -> NoReturn:
    raise InvalidRequestError(
        f"The results of tool calls do not fit the calls: {problem}. Send one result for each call, "
        "with its id.",
        param=param,
    )
