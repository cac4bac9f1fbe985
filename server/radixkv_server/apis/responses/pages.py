# SPDX-License-Identifier: Apache-2.0
"""Pages of lists of items."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import QueryParams

from radixkv_server.apis.responses.schemas import INCLUDABLE
from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request

MAX_ITEMS = 100
#: Names of the query parameters.
PAGE_QUERY = ("after", "include", "limit", "order")


def page_of(items: Sequence[Json], asked: QueryParams) -> Json:
    """Return a page of a list, by `order` (newest first unless `asc`), `after` and `limit`.

    Raises:
        ApiError: 400; a parameter is wrong.
    """
    check_include(asked)
    order, limit, after = asked.get("order", "desc"), asked.get("limit", "20"), asked.get("after")
    if order not in ("asc", "desc"):
        raise bad_request("order must be 'asc' or 'desc'.", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_ITEMS):
        raise bad_request(f"limit must be an integer from 1 to {MAX_ITEMS}.", param="limit")
    left = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        indices = [index for index, item in enumerate(left) if item["id"] == after]
        if not indices:
            raise bad_request(f"after: there is no item {after[:200]!r}.", param="after")
        left = left[indices[0] + 1 :]
    return listed(left[: int(limit)], has_more=len(left) > int(limit))


def listed(items: Sequence[Json], *, has_more: bool = False) -> Json:
    """Return a list object."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def check_include(asked: QueryParams) -> None:
    """Refuse unknown values of `include`; the known ones change nothing of stored items.

    Raises:
        ApiError: 400.
    """
    for name in (*asked.getlist("include"), *asked.getlist("include[]")):
        if name not in INCLUDABLE:
            known = ", ".join(sorted(INCLUDABLE))
            raise bad_request(f"include: {name[:80]!r} is none of {known}.", param="include")
