# SPDX-License-Identifier: Apache-2.0
"""The choice between a family's own reader and the response template of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from radixkv.text.chat_formats.answer import Answer, AnswerWriter
from radixkv.text.chat_formats.arguments import object_of
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.response_template import (
    CALLS,
    PARTS,
    ResponseTemplate,
    ResponseTemplateParser,
)

RESPONSE_TEMPLATE = "response-template"
_PROBE = (("probe_alpha", {"probe_key": "probe first"}), ("probe_beta", {"probe_key": "x"}))


def with_response_template(chat_format: ChatFormat, given: Mapping[str, Any]) -> ChatFormat:
    """Return the format with a response template, where its own readers do not read the same.

    Raises:
        ValueError: it is not a response template of this version.
    """
    template = ResponseTemplate.load(given)
    thoughts = template.thoughts
    own = chat_format.reasoning
    is_same = thoughts is None or (own is not None and thoughts.opens[0].strip() in own.opens)
    if is_same and chat_format.is_known and _reads_calls(template, chat_format):
        return chat_format
    known = replace(chat_format, response=template, reasoning=thoughts or own, is_known=True)
    return known if chat_format.is_known else replace(known, name=RESPONSE_TEMPLATE)


def _reads_calls(template: ResponseTemplate, chat_format: ChatFormat) -> bool:
    """Return whether a template reads the calls that a format writes."""
    if not any(PARTS.get(name) == CALLS for name in template.spec.fields):
        return True
    if chat_format.form is None:
        return False
    written = chat_format.write_calls([(name, json.dumps(given)) for name, given in _PROBE])
    parser = ResponseTemplateParser(template, AnswerWriter(True, lambda: "", speaks=True))
    calls = Answer.of([*parser.push(written), *parser.finish()]).tool_calls
    return [(call.name, object_of(call.arguments)) for call in calls] == list(_PROBE)
