# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of structured outputs as text: in its enforced form, and as a part of another grammar."""

from __future__ import annotations

import json

from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.closed_objects import close_objects


def json_schema(spec: StructuredOutputs) -> str | None:
    """Return the JSON Schema with llguidance's options in it, for a grammar that it is a part of.

    None: there is no schema, or its text is not an object.
    """
    if spec.kind not in ("json", "json_object"):
        return None
    try:
        schema = json.loads(schema_text(spec))
    except (ValueError, RecursionError):
        return None
    if not isinstance(schema, dict):
        return None
    options = {
        "json_allowed_escapes": '"\\bfnrt',  # one spelling for each character: see `json_escapes`
        "whitespace_flexible": not spec.disable_any_whitespace,
        "whitespace_pattern": spec.whitespace_pattern,
    }
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def schema_text(spec: StructuredOutputs) -> str:
    """Return the enforced JSON Schema of `json` or `json_object`, on request with closed objects.

    Text other than a schema stays unchanged.
    """
    if spec.json is None:
        return '{"type":"object"}'
    text = str(spec.json)
    if not spec.disable_additional_properties:
        return text
    try:
        schema = json.loads(text)
        return json.dumps(close_objects(schema), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text
