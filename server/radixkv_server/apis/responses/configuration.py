# SPDX-License-Identifier: Apache-2.0
"""Effort and form of a response: fields of the body, and items that change them for the turns after.

    body: reasoning, text  <-  configuration_update  <-  configuration_update  ...    the latest one counts

An item writes nothing into the prompt by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import model_validator

from radixkv.sampling.structured import StructuredOutputs
from radixkv_server.apis.common.answer_formats import SchemaFields, format_grammar
from radixkv_server.apis.common.fields import Verbosity
from radixkv_server.dialect import Json
from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import EmptyCounts, NoOp, WithoutEffect

UPDATE = "configuration_update"


class TextFormat(SchemaFields):
    type: str

    def grammar(self) -> StructuredOutputs | None:
        """Return the grammar of the text; None: any text."""
        return format_grammar({"type": self.type}, self.given(), "text.format")

    def plain(self) -> dict[str, Any]:
        """Return the format as the response shows it."""
        return {"type": self.type, **self.given()}


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Verbosity = None


_InFull = Annotated[Any, WithoutEffect("reasoning is given in full", usual=("auto",))]


class Reasoning(StrictModel):
    effort: str | None = None
    summary: _InFull = None
    generate_summary: _InFull = None
    context: Annotated[Any, WithoutEffect("the template decides", usual=("auto",))] = None
    mode: Annotated[Any, WithoutEffect("the model has one", usual=("standard",))] = None


class ConfigurationFields(StrictModel):
    """Fields of a body that items of its conversation change."""

    text: TextConfig | None = None
    reasoning: Reasoning | None = None


class ConfigurationItem(ConfigurationFields):
    """An item that changes how the responses after it think, or the form of their text."""

    type: Literal["configuration_update"]
    reasoning: Annotated[Reasoning, EmptyCounts] | None = None
    id: str | None = None
    status: NoOp = None
    created_by: NoOp = None

    @model_validator(mode="after")
    def _changes_something(self) -> ConfigurationItem:
        if self.text is None and self.reasoning is None:
            raise ParamError(
                f"an item of type {UPDATE!r} needs reasoning or text.", code="missing_required_parameter"
            )
        return self

    def plain(self, item_id: str) -> Json:
        """Return the item in the form of the store."""
        kept = self.model_dump(include={"text", "reasoning"}, exclude_unset=True, by_alias=True)
        return {"id": item_id, "type": UPDATE, **kept}


Body = TypeVar("Body", bound=ConfigurationFields)


def configured(body: Body, items: Iterable[Json]) -> Body:
    """Return a body with the changes that its conversation's items make. O(items)."""
    changes: dict[str, Any] = {}
    for item in items:
        if item["type"] == UPDATE:
            changed = ConfigurationItem.model_validate(item)
            if changed.reasoning is not None:
                given = body.reasoning or Reasoning()
                changes["reasoning"] = given.model_copy(update={"effort": changed.reasoning.effort})
            if changed.text is not None:
                text = body.text or TextConfig()
                changes["text"] = text.model_copy(update={"format": changed.text.format})
    return body.model_copy(update=changes) if changes else body
