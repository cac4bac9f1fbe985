# SPDX-License-Identifier: Apache-2.0
"""OpenAPI document of an app's routes, made of the models that check their bodies.

Routes read their bodies by hand, so each `Api` names the models. A model's schema says less than its
validators check, never more: a body that it allows may still get a 400 that names the field.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from radixkv_server.dialect import Api, Dialects, Json, dump
from radixkv_server.errors import ApiError

_EXAMPLE = ApiError(400, "why", param="field", code="code")
_REFERENCE = "#/components/schemas/{model}"


def add_openapi(app: FastAPI, apis: Sequence[Api], dialects: Dialects, version: str) -> None:
    """Serve the document of all routes that `app` has, at /openapi.json.

    Making it builds FastAPI's routes, too, which would otherwise happen within the first request.
    """
    document = dump(openapi_document(app, apis, dialects, version))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")


def openapi_document(app: FastAPI, apis: Sequence[Api], dialects: Dialects, version: str) -> Json:
    """OpenAPI 3.1: paths with their bodies and errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Duplicate Operation ID")  # GET and HEAD of one route
        document = get_openapi(title="radixkv", version=version, routes=app.routes)
    models = sorted(
        {model for api in apis for model in api.bodies.values()}, key=lambda model: model.__name__
    )
    references, definitions = _schemas(tuple(models))
    schemas: Json = dict(definitions.get("$defs", {}))
    bodies = {operation: model for api in apis for operation, model in api.bodies.items()}
    queries = {operation: names for api in apis for operation, names in api.queries.items()}
    for path, item in document["paths"].items():
        item.pop("head", None)
        dialect = dialects.of(path)
        name = type(dialect).__name__.removesuffix("Dialect") + "Error"
        schemas[name] = _schema_of(dialect.error_body(_EXAMPLE, "id"))
        for method, operation in item.items():
            key = f"{method.upper()} {path}"
            operation["operationId"] = key
            operation["responses"].pop("422", None)  # FastAPI's own, which no route gives
            operation["responses"]["default"] = {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=name)}}},
            }
            if key in bodies:
                schema = references[bodies[key], "validation"]
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
            operation.setdefault("parameters", []).extend(
                {"name": query, "in": "query", "required": False, "schema": {"type": "string"}}
                for query in queries.get(key, ())
            )
    document["components"] = {"schemas": schemas}
    return document


@functools.cache
def _schemas(models: tuple[type[BaseModel], ...]) -> tuple[Mapping[Any, Json], Json]:
    """References to the models' schemas, and their definitions; they take 0.1 s, the same for each app."""
    return models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)


def _schema_of(example: Any) -> Json:
    """The schema of values like this one; strings may be null."""
    if isinstance(example, dict):
        properties = {name: _schema_of(value) for name, value in example.items()}
        return {"type": "object", "required": list(properties), "properties": properties}
    return {"type": ["string", "null"]}
