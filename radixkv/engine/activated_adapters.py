# SPDX-License-Identifier: Apache-2.0
"""Start of an adapter in a prompt: the first token or, if it is activated, its last invocation."""

from __future__ import annotations

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, encode_tokens
from radixkv.engine.adapters import adapted
from radixkv.scheduling.request import Request


def begin_adapter(request: Request, prompt: EncodedTokens) -> None:
    """Say where a request's adapter begins, and in which namespace its shared prefixes are.

    An activated adapter begins with the last invocation in the prompt, as PEFT has it; without one, the base
    answers alone.
    """
    if request.adapter.invocation:
        start = last_place(prompt.data, encode_tokens(request.adapter.invocation))
        if start is None:
            request.adapter = None
            return
        request.adapter_from = start
    if not request.adapter_from:
        request.namespace = adapted(request.namespace, request.adapter.identity)


def last_place(data: bytes, wanted: bytes) -> int | None:
    """The token at which encoded tokens hold others for the last time; None: nowhere. O(length)."""
    at = data.rfind(wanted)
    while at % TOKEN_BYTES and at >= 0:
        at = data.rfind(wanted, 0, at + len(wanted) - 1)
    return None if at < 0 else at // TOKEN_BYTES
