# SPDX-License-Identifier: Apache-2.0
"""Pages of lists of objects with ids."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import QueryParams

from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request

MAX_ITEMS = 100


def page_of(items: Sequence[Json], asked: QueryParams, *, usual: int = 20, most: int = MAX_ITEMS) -> Json:
    """Return a page of a list, by `order` (newest first unless `asc`), `after` and `limit`.

    Args:
        items: the oldest first.
        usual: items of a page where the query has no limit.
        most: most items of a page.

    Raises:
        ApiError: 400; a parameter is wrong.
    """
    order, limit, after = asked.get("order", "desc"), asked.get("limit", str(usual)), asked.get("after")
    if order not in ("asc", "desc"):
        raise bad_request("order must be 'asc' or 'desc'.", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= most):
        raise bad_request(f"limit must be an integer from 1 to {most}.", param="limit")
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
