# SPDX-License-Identifier: Apache-2.0
"""Every field of the SDKs' requests is decided: it works, changes nothing, or is refused by name."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any

import anthropic.types.beta as beta
import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
)
from pydantic import BaseModel

from radixkv_server.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from radixkv_server.apis.responses.schemas import CompactRequest, InputTokensRequest, ResponseRequest
from radixkv_server.http.fields import FieldRow, field_rows

UNIONS = (typing.Union, UnionType)
WRAPPERS = (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated)


def paths_of(kind: Any, path: str, known: dict[str, FieldRow], outer: tuple[Any, ...] = ()) -> Iterator[str]:
    """The paths of all fields below a type of the SDK's, but variants refused by their type."""
    origin = typing.get_origin(kind)
    if origin in WRAPPERS or origin in UNIONS:
        for member in typing.get_args(kind)[: None if origin in UNIONS else 1]:
            yield from paths_of(member, path, known, outer)
    elif typing_extensions.is_typeddict(kind):
        if kind in outer or is_refused_variant(kind, path, known):
            return
        for name, of_field in typing_extensions.get_type_hints(kind, include_extras=True).items():
            place = f"{path}.{name}" if path else name
            yield place
            row = known.get(place)
            if row is None or not row.is_open:
                yield from paths_of(of_field, place, known, (*outer, kind))
    elif origin is not None and origin is not typing.Literal and not isinstance(origin, type(dict)):
        return
    elif origin in (list, tuple) or getattr(origin, "__name__", "") in ("Iterable", "Sequence"):
        yield from paths_of(typing.get_args(kind)[0], path + "[]", known, outer)


def is_refused_variant(kind: Any, path: str, known: dict[str, FieldRow]) -> bool:
    """Whether a variant's `type` is none of those that our model takes here."""
    ours = known.get(f"{path}.type")
    hint = typing_extensions.get_type_hints(kind).get("type")
    if ours is None or not ours.kinds or hint is None or typing.get_origin(hint) is not typing.Literal:
        return False
    return not set(typing.get_args(hint)) & set(ours.kinds)


@pytest.mark.parametrize(
    ("body", "params"),
    [
        pytest.param(ChatCompletionRequest, chat_params.CompletionCreateParamsBase, id="chat"),
        pytest.param(ChatCompletionRequest, chat_params.CompletionCreateParamsStreaming, id="chat stream"),
        pytest.param(CompletionRequest, completion_create_params.CompletionCreateParamsBase, id="text"),
        pytest.param(ResponseRequest, response_create_params.ResponseCreateParamsBase, id="responses"),
        pytest.param(
            ResponseRequest, response_create_params.ResponseCreateParamsStreaming, id="responses stream"
        ),
        pytest.param(InputTokensRequest, input_token_count_params.InputTokenCountParams, id="input_tokens"),
        pytest.param(CompactRequest, response_compact_params.ResponseCompactParams, id="compact"),
        pytest.param(MessagesRequest, message_create_params.MessageCreateParamsBase, id="messages"),
        pytest.param(
            CountTokensRequest, message_count_tokens_params.MessageCountTokensParams, id="count_tokens"
        ),
        pytest.param(MessagesRequest, beta.message_create_params.MessageCreateParamsBase, id="beta messages"),
        pytest.param(
            CountTokensRequest,
            beta.message_count_tokens_params.MessageCountTokensParams,
            id="beta count_tokens",
        ),
    ],
)
def test_all_fields_of_the_sdk_are_known(body: type[BaseModel], params: Any) -> None:
    known = {row.path: row for row in field_rows(body)}
    asked = set(paths_of(params, "", known))
    assert len(asked) > 8
    assert sorted(asked - set(known)) == [], "unknown fields"
