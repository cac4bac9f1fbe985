# SPDX-License-Identifier: Apache-2.0
"""Caller and query parameters of requests to the cache's routes."""

from __future__ import annotations

from starlette.requests import Request

from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.context import context_of
from radixkv_server.errors import bad_request
from radixkv_server.generation.request import check_salt
from radixkv_server.http.request_record import record_of


def caller_of(request: Request, cache_salt: str | None = None, model: str | None = None) -> Caller:
    """Return the caller of a request.

    Args:
        cache_salt, model: as the request says them; None: not at all.

    Raises:
        ApiError: 400; the salt is malformed. 404; the caller may not use the adapter that the model names.
    """
    tenant = record_of(request.scope).caller
    salt = "" if cache_salt is None else check_salt(cache_salt)
    context = context_of(request)
    card = context.engine.adapters.card(context.adapter_name(model, tenant))
    return Caller(tenant.name, salt, tenant.is_admin, "" if card is None else card.namespace_part)


def query_of(request: Request, *known: str) -> dict[str, str]:
    """Return the parameters after the `?`, each given at most once.

    Args:
        known: names that the route takes; values are not checked.

    Raises:
        ApiError: 400 for an unknown parameter, or one given twice.
    """
    items = request.query_params.multi_items()
    values = dict(items)
    for name, _ in items:
        if name not in known:
            raise bad_request(
                f"Unrecognized query parameter: {name[:100]}; this route takes {', '.join(known) or 'none'}.",
                param=name[:100],
                code="unknown_parameter",
            )
    if len(values) < len(items):
        raise bad_request("A query parameter is given twice.")
    return values


def number_in(values: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return an integer of the query.

    Raises:
        ApiError: 400; it is none, or out of range.
    """
    text = values.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise bad_request(f"{name} must be an integer from {least} to {most}, not {text[:40]!r}.", param=name)
    return int(text)
