"""Objects that are told apart by their `type`: the tag of a union's member, and a refusal in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BeforeValidator, Discriminator

from radixkv_server.http.body import ParamError

#: Tells the members of a union apart by `type`. Each has the tag `[type]`: tags in brackets are left out of
#: the field names in error messages.
BY_TYPE = Discriminator(lambda value: f"[{value['type'] if isinstance(value, dict) else value.type}]")


def known_kind(*kinds: str, what: str, refusal: Callable[[str], str]) -> BeforeValidator:
    """Refuse an object of another type in words; a union would only list its own tags.

    Args:
        what: the object is, for one without a type.
        refusal: the message about another type.
    """

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise ParamError(f"{what} must be an object with a type.", code="invalid_type")
        if kind not in kinds:
            raise ParamError(refusal(kind[:40]), code="unsupported_content")
        return value

    return BeforeValidator(check)
