# SPDX-License-Identifier: Apache-2.0
r"""Escapes allowed in generated JSON: one spelling for each character.

llguidance compares keys as they are written. If "a" might be spelled \u0061 as well, a key could be spelled
so that neither `properties` nor `patternProperties` knew it.
"""

from __future__ import annotations

import json
import re

from radixkv.grammar.exact_patterns import exact_patterns
from radixkv.grammar.limits import json_parts_of_lark

_SHORT = '"\\bfnrt'
#: A control character that has no short escape, in the text of a schema.
_CONTROL = re.compile(r"\\u00(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])")


def allowed_escapes(schema: str) -> str:
    r"""Return the characters that may follow a backslash in answers of a schema, given as text.

    \u is left out, and with it the control characters that have no other escape; but for schemas whose
    constants may have them and whose keys no pattern tells apart.
    """
    needs_long = _CONTROL.search(schema) is not None and '"patternProperties"' not in schema
    return _SHORT + "u" * needs_long


def exact_schemas(grammar: str) -> str:
    """Return a Lark grammar whose schemas have exact patterns and, unless they name some, allowed escapes.

    Lines keep their numbers.
    """
    written, done = [], 0
    for begin, end in json_parts_of_lark(grammar):
        given = grammar[begin:end]
        schema = exact_patterns(given)
        schema = schema[:-1] + "\n" * (given.count("\n") - schema.count("\n")) + "}"
        if '"x-guidance"' not in schema:
            inside = schema[1:].lstrip()
            option = json.dumps({"x-guidance": {"json_allowed_escapes": allowed_escapes(schema)}})
            schema = option[:-1] + ("" if inside.startswith("}") else ",") + inside
        written += [grammar[done:begin], schema]
        done = end
    return "".join([*written, grammar[done:]])
