# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine's request that every API makes: sampling parameters, place in the cache, pins, ids."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from radixkv.cache.keys import EncodedTokens
from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin, Request
from radixkv_server.errors import bad_request

MAX_SALT_LENGTH = 128
_SALT = re.compile(r"[A-Za-z0-9_.+/=:~-]+")


def encoded_prompt(request: Request) -> EncodedTokens:
    """Return the tokens of a request's prompt, which the server has encoded."""
    assert isinstance(request.prompt, EncodedTokens)
    return request.prompt


def cache_options(salt: str | None, cache_key: str | None) -> dict[str, Any]:
    """Return the arguments of Request for a place in the cache.

    Args:
        salt: names a part of its tenant's space; None: the common part.
        cache_key: key shared by related requests; None: there is none.

    Raises:
        ApiError: 400; the salt is malformed.
    """
    return {"salt": "" if salt is None else check_salt(salt), "cache_key_hint": cache_key or ""}


def pin_whole(request: Request, ttl: float | None) -> None:
    """Have the whole prompt of a request pinned for `ttl` seconds; None: change nothing."""
    if ttl is not None:
        request.pins = (*request.pins, PrefixPin(len(request.prompt), ttl))


def check_salt(salt: str) -> str:
    """Return a salt after a check of its form.

    Raises:
        ApiError: it is empty, too long, or has other characters or path segments than a salt may have.
    """
    good = 1 <= len(salt) <= MAX_SALT_LENGTH and _SALT.fullmatch(salt) is not None
    if not good or any(part in (".", "..") for part in salt.split("/")):
        raise bad_request(
            f"cache_salt must have 1 to {MAX_SALT_LENGTH} characters out of letters, digits and "
            "_.+/=:~-, without . or .. between slashes.",
            param="cache_salt",
        )
    return salt


def new_id(prefix: str) -> str:
    """Make the id of an answer: the prefix and 32 hex digits."""
    return f"{prefix}{uuid.uuid4().hex}"


def sampling_params(
    options: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    room: int,
    renamed: Mapping[str, str] | None = None,
    prompt_only: bool = False,
) -> SamplingParams:
    """Make SamplingParams from the fields of a body; errors name the field as the client wrote it.

    Whether the model has the tokens that they name is for the engine to say.

    Args:
        options: arguments of SamplingParams. `max_tokens` is clamped to `room`; a value below 1 is refused.
        defaults: arguments where `options` has none: the model's.
        room: tokens left of the context after the prompt.
        renamed: argument -> field of the body, where they differ.
        prompt_only: nothing is to be generated, whatever `max_tokens` and `min_tokens` say.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    wanted = options.get("max_tokens")
    try:
        if prompt_only:
            return SamplingParams(**{**defaults, **options, "max_tokens": 0, "min_tokens": 0, "n": 1})
        if wanted == 0:
            raise InvalidRequestError("max_tokens must be at least 1, not 0", param="max_tokens")
        max_tokens = None if wanted is None else min(wanted, room)
        return SamplingParams(**{**defaults, **options, "max_tokens": max_tokens})
    except InvalidRequestError as error:
        param = (renamed or {}).get(error.param or "", error.param)
        raise InvalidRequestError(str(error), param=param, code=error.code) from None
