# SPDX-License-Identifier: Apache-2.0
"""Pages of lists of items, with the query parameter `include`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import QueryParams

from radixkv_server.apis.common import pages
from radixkv_server.apis.responses.schemas import INCLUDABLE
from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request

#: Names of the query parameters.
PAGE_QUERY = ("after", "include", "limit", "order")


def page_of(items: Sequence[Json], asked: QueryParams) -> Json:
    """Return a page of a list, by `order` (newest first unless `asc`), `after` and `limit`.

    Raises:
        ApiError: 400; a parameter is wrong.
    """
    check_include(asked)
    return pages.page_of(items, asked)


def check_include(asked: QueryParams) -> None:
    """Refuse unknown values of `include`; the known ones change nothing of stored items.

    Raises:
        ApiError: 400.
    """
    for name in (*asked.getlist("include"), *asked.getlist("include[]")):
        if name not in INCLUDABLE:
            known = ", ".join(sorted(INCLUDABLE))
            raise bad_request(f"include: {name[:80]!r} is none of {known}.", param="include")
