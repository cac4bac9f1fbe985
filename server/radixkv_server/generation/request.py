# SPDX-License-Identifier: Apache-2.0
"""Asking: the common form of all APIs' bodies, and the checks that they share."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import EncodedTokens
from radixkv.errors import InvalidRequestError
from radixkv.observe.prompt_parts import PromptParts
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin, Request
from radixkv.text.chat_formats.client_rules import ClientRule
from radixkv_server.diagnostics.comparison import Comparison
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.errors import bad_request
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.usage import Hint, PlaceName

MAX_SALT_LENGTH = 128

#: Makes the parts of a prompt, at the cost of converting all messages: called on demand.
MakeParts = Callable[[], PromptParts]

_AS_GIVEN = GrammarPlaces("structured_outputs")
_SALT = re.compile(r"[A-Za-z0-9_.+/=:~-]+")


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Facts of a chat about its prompt.

    Args:
        hint: makes an addition to the reason in the prompt's miss report.
        place_name: names the message that contains a place of the prompt.
        last_message: beginning of a chat's last message; "" is no chat.
        grammar_places: fields of the body that the answer's grammar comes from, for errors.
        client_rule: rule that held the client's own text constant; None: none applied.
        parts: makes the parts by which prompts are compared; None: only the text is known.
        ignored: fields of the body without effect, for the header `warning`.
        notes: further notes for that header.
    """

    hint: Hint | None = None
    place_name: PlaceName | None = None
    last_message: str = ""
    grammar_places: GrammarPlaces = _AS_GIVEN
    client_rule: ClientRule | None = None
    parts: MakeParts | None = None
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asking:
    """The engine's requests for an HTTP request, independent of its API.

    Args:
        id: id of the answer, from which the engine's requests get theirs.
        requests: a request per prompt, at least one.
        facts: facts of each prompt.
        stream: stream the answer instead of sending it at the end.
        prompt_param: name of the prompt's field in the body, for errors about its length.
        operation: name of the operation in traces: `chat` or `text_completion`.
        fingerprint: key by which later requests are compared with it; None: they can't be.
        comparison: comparison with an earlier request; None: there is none.
        writes_to_pins: count tokens up to the last pin as written in the usage, as Messages does.
    """

    id: str
    requests: tuple[Request, ...]
    facts: tuple[PromptFacts, ...]
    stream: bool
    prompt_param: str
    operation: str = "chat"
    fingerprint: Fingerprint | None = None
    comparison: Comparison | None = None
    writes_to_pins: bool = False

    def __post_init__(self) -> None:
        for index, request in enumerate(self.requests):
            request.request_id = f"{self.id}-{index}"

    @property
    def written_ends(self) -> list[int | None]:
        """Return the number of leading tokens of each prompt that can count as written; None: all."""
        if not self.writes_to_pins:
            return [None] * len(self.requests)
        return [max((pin.num_tokens for pin in request.pins), default=0) for request in self.requests]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    def longest_answer(self, assumed: int) -> int:
        """Return the most tokens that may be generated, over all samples; `assumed` is the default limit."""
        each = ((request.params.max_tokens, request.params.num_samples) for request in self.requests)
        return sum((assumed if limit is None else limit) * count for limit, count in each)


def token_ids(request: Request) -> npt.NDArray[np.int32]:
    """Tokens of a request's prompt, which the server has encoded."""
    assert isinstance(request.prompt, EncodedTokens)
    return request.prompt.token_ids


def pin_whole(request: Request, ttl: float | None) -> None:
    """Have the whole prompt of a request pinned for `ttl` seconds; None: change nothing."""
    if ttl is not None:
        request.pins = (*request.pins, PrefixPin(len(request.prompt), ttl))


def do_not_cache(request: Request) -> None:
    """Have a request run without the prefix cache."""
    request.pins, request.keep_tokens = (), 0
    request.salt, request.cache_key_hint = new_id("uncached-"), ""


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
