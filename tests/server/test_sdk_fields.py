"""Every field of the openai SDK's requests is decided: it works, changes nothing, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from radixkv_server.apis.responses.schemas import ResponseRequest

DOCS = (Path(__file__).parents[2] / "docs" / "http_api.md").read_text()


def fields(*types: Any) -> set[str]:
    return {name for kind in types for name in kind.__annotations__}


@pytest.mark.parametrize(
    ("body", "sdk"),
    [
        (
            ChatCompletionRequest,
            fields(chat_params.CompletionCreateParamsBase, chat_params.CompletionCreateParamsStreaming),
        ),
        (
            CompletionRequest,
            fields(
                completion_create_params.CompletionCreateParamsBase,
                completion_create_params.CompletionCreateParamsStreaming,
            ),
        ),
        (
            ResponseRequest,
            fields(
                response_create_params.ResponseCreateParamsBase,
                response_create_params.ResponseCreateParamsStreaming,
            ),
        ),
    ],
)
def test_all_fields_of_the_sdk_are_known_and_documented(body: Any, sdk: set[str]) -> None:
    assert len(sdk) > 10
    assert sdk - set(body.model_fields) == set(), "unknown fields"
    assert {name for name in sdk if f"`{name}" not in DOCS} == set(), "not in docs/http_api.md"
