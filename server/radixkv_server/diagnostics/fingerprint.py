# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of requests, for comparisons with later ones, and a bounded store of the latest ones.

    model | each tool | each block of the system prompt | each message | each parameter     one hash each
    each token of the prompt, at its position                                                one hash each

No text is kept. All hashes are keyed with a secret of this process, and meaningless to others.

Every chat gets its fingerprint before it runs, although few are ever asked about: which ones is not known
until a later request names them, and then their bodies are gone. It costs little: 0.65 ms of CPU time for a
chat of 50 messages and 15 tools with 12,000 tokens, about as much as validating its body; 2.4 ms with
100,000 tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

_DIGEST_BYTES = 16
_SECRET = secrets.token_bytes(32)
_OFFSET = np.uint64(secrets.randbits(64))
# Factors of splitmix64's finaliser.
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

TokenHashes = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first part in which two requests differ.

    Args:
        part: `model`, `tools`, `system`, `messages`, or the name of a parameter.
        index: index of the tool, block or message; None: the part is no list.
        compacted: a summary has replaced messages.
    """

    part: str
    index: int | None = None
    compacted: bool = False


@dataclass(slots=True, eq=False)
class Fingerprint:
    """Hashes of a request's parts and tokens; made by `fingerprint_of`.

    Attributes:
        reusable_tokens: tokens of its prompt that the cache held after its computation.
        is_running: its answer has not ended.
    """

    api: str
    model: bytes
    tools: tuple[bytes, ...]
    system: tuple[bytes, ...]
    messages: tuple[bytes, ...]
    parameters: Mapping[str, bytes]
    summaries: frozenset[bytes]
    tokens: TokenHashes
    reusable_tokens: int = 0
    is_running: bool = True

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        hashes = len(self.tools) + len(self.system) + len(self.messages) + len(self.summaries)
        return 1024 + 64 * (hashes + len(self.parameters)) + self.tokens.nbytes

    def first_difference(self, later: Fingerprint) -> FirstDifference | None:
        """Return the first part that a later request changed: model, tools, system, messages, parameters.

        Appended messages are no change; dropped ones are. O(parts).
        """
        if self.model != later.model:
            return FirstDifference("model")
        for part, one, other in (
            ("tools", self.tools, later.tools),
            ("system", self.system, later.system),
            ("messages", self.messages, later.messages[: len(self.messages)]),
        ):
            if one != other:
                both = enumerate(zip(one, other, strict=False))
                index = next((at for at, (mine, its) in both if mine != its), min(len(one), len(other)))
                compacted = part == "messages" and bool(later.summaries - self.summaries)
                return FirstDifference(part, index, compacted)
        for name in dict.fromkeys((*self.parameters, *later.parameters)):
            if self.parameters.get(name, _NOTHING) != later.parameters.get(name, _NOTHING):
                return FirstDifference(name)
        return None

    def num_shared_tokens(self, later: Fingerprint) -> int:
        """Return the length of the common prefix of both prompts. O(tokens)."""
        count = min(len(self.tokens), len(later.tokens))
        differs = self.tokens[:count] != later.tokens[:count]
        return int(differs.argmax()) if differs.any() else count


def fingerprint_of(
    token_ids: npt.NDArray[np.int32],
    *,
    api: str,
    model: Any,
    tools: Sequence[Any] = (),
    system: Sequence[Any] = (),
    messages: Sequence[Any] = (),
    parameters: Mapping[str, Any],
    summaries: Sequence[Any] = (),
) -> Fingerprint:
    """Make the fingerprint of a request. O(its text): about 5 ms for 100,000 tokens.

    Args:
        token_ids: its prompt, int32 [n].
        api: kind of request; requests of different kinds are not comparable.
        tools: in OpenAI's form, as chat templates take them; like all parts, JSON-like data.
        system, messages: blocks of text, and objects whose `content` is a list of blocks.
        parameters: everything else that shapes the prompt or chooses its part of the cache; None equals a
            missing one.
        summaries: messages that replace a part of the conversation.
    """
    return Fingerprint(
        api,
        _digest(model),
        _digests(tools),
        _digests(system),
        _digests(messages),
        {name: _digest(value) for name, value in parameters.items()},
        frozenset(_digests(summaries)),
        _token_hashes(token_ids),
    )


def _digests(values: Iterable[Any]) -> tuple[bytes, ...]:
    return tuple(map(_digest, values))


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(to_json(value), digest_size=_DIGEST_BYTES, key=_SECRET).digest()


_NOTHING = _digest(None)


def _token_hashes(token_ids: npt.NDArray[np.int32]) -> TokenHashes:
    """Hash each token with its position."""
    positions = np.arange(len(token_ids), dtype=np.uint64) << np.uint64(32)
    mixed = positions + token_ids.astype(np.uint64) + _OFFSET
    for factor, shift in zip(_FACTORS, (30, 27), strict=True):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(32)).astype(np.uint32)


#: Most requests of a tenant, and most bytes of them: prompts of four million tokens.
MAX_REQUESTS = 1000
MAX_BYTES = 16 * 1024 * 1024


class FingerprintStore:
    """Keeps requests of each tenant; its oldest make room for its new ones, never another tenant's.

    All methods are O(1), amortised.

    Args:
        max_requests, max_bytes: bounds of one tenant.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[str, Fingerprint]] = {}
        self._bytes: dict[str, int] = {}

    def put(self, tenant: str, request_id: str, kept: Fingerprint) -> None:
        """Keep a request, the tenant's latest; its id is new."""
        requests = self._tenants.setdefault(tenant, OrderedDict())
        requests[request_id] = kept
        size = self._bytes.get(tenant, 0) + kept.num_bytes
        while len(requests) > self._max_requests or size > self._max_bytes:
            size -= requests.popitem(last=False)[1].num_bytes
        self._bytes[tenant] = size

    def get(self, tenant: str, request_id: str, api: str) -> Fingerprint | None:
        """Return a tenant's request of one API and count it as used; None: there is none, or no longer."""
        requests = self._tenants.get(tenant, OrderedDict())
        kept = requests.get(request_id)
        if kept is None or kept.api != api:
            return None
        requests.move_to_end(request_id)
        return kept

    def num_bytes(self, tenant: str) -> int:
        """Return the size of a tenant's fingerprints."""
        return self._bytes.get(tenant, 0)
