# SPDX-License-Identifier: Apache-2.0
"""Bodies of the rerank and score routes: Cohere's and Jina's shape, and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from radixkv_server.apis.common.fields import RequestFields
from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import Refused, WithoutEffect

MAX_LABELS = 16


class Document(StrictModel):
    """A document as an object."""

    text: str


class PromptMessage(StrictModel):
    """A message of the prompt that asks about one document."""

    role: str
    content: str


class JudgeFields(RequestFields):
    """Fields of all routes here: how the model is asked.

    Attributes:
        instruction: the task, in the words of the model's card.
        labels: answers that are one token each; the first means relevant.
        messages: prompt in the place of the usual one, with `{query}`, `{document}` and `{instruction}`.
    """

    instruction: str | None = None
    labels: list[str] | None = None
    messages: list[PromptMessage] | None = Field(default=None, min_length=1)

    @field_validator("labels")
    @classmethod
    def _several(cls, labels: list[str] | None) -> list[str] | None:
        if labels is not None and not 2 <= len(set(labels)) == len(labels) <= MAX_LABELS:
            raise ValueError(
                f"labels must be 2 to {MAX_LABELS} different texts, the first for relevant ones."
            )
        return labels

    @model_validator(mode="after")
    def _with_document(self) -> JudgeFields:
        if self.messages is not None:
            text = "".join(message.content for message in self.messages)
            if "{document}" not in text or "{query}" not in text:
                raise ParamError("messages must have {query} and {document} where these belong.", "messages")
        if self.stream:
            raise ParamError("scores come together: leave stream out.", "stream")
        return self


class RerankRequest(JudgeFields):
    """Body of POST /v1/rerank."""

    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: int | None = None
    return_documents: bool | None = None
    rank_fields: Annotated[Any, Refused("documents with several fields: join them to one text")] = None
    max_chunks_per_doc: Annotated[Any, WithoutEffect("documents are judged whole")] = None
    max_tokens_per_doc: Annotated[Any, WithoutEffect("documents are judged whole")] = None
    overfetch_factor: Annotated[Any, WithoutEffect("every document is judged")] = None

    @field_validator("top_n")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("top_n must be at least 1.")
        return value

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreRequest(JudgeFields):
    """Body of POST /score: one text against each of others, or as many pairs."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    truncate_prompt_tokens: Annotated[Any, WithoutEffect("texts are judged whole")] = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Query and document of each score.

        Raises:
            ParamError: one is missing, or their numbers don't fit.
        """
        first = self.text_1 if self.text_1 is not None else self.queries
        second = self.text_2 if self.text_2 is not None else self.documents
        if not first or not second:
            raise ParamError("text_1 and text_2 (or queries and documents) must not be empty.", "text_1")
        queries = [first] if isinstance(first, str) else first
        documents = [second] if isinstance(second, str) else second
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise ParamError(
                f"text_1 has {len(queries)} texts and text_2 {len(documents)}: give one, or as many.",
                "text_2",
            )
        return list(zip(queries, documents, strict=True))

    @model_validator(mode="after")
    def _whole_pairs(self) -> ScoreRequest:
        assert self.pairs
        return self
