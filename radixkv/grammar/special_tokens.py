# SPDX-License-Identifier: Apache-2.0
"""Special tokens that no text spells: for grammars whose answers hold the spelling of one.

Where only one text can follow, llguidance takes the tokens that the tokenizer makes of it. Of `<|im_start|>`
a tokenizer makes one special token, which stands for no text in a grammar: the answer could not go on. So
llguidance is given a tokenizer whose special tokens have spellings never found in text.
"""

from __future__ import annotations

import json
import re
from typing import Any

#: WORD JOINER, the second character of such a spelling: it is not seen where it is printed.
_MARK = "\u2060"
#: A named token of a Lark grammar, and the parts that may look like one.
_LARK_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|\#[^\n]*|<(?P<name>[^\[<>\s][^<>\s]*)>'
)


def hide_special_tokens(tokenizer: str) -> str:
    """Return the JSON text of a tokenizer with spellings of special tokens that occur in no text.

    Ids stay. To parse the whole text would hold the interpreter for a third of a second.
    """
    head, key, model = tokenizer.partition('"model":')
    tokens, _ = json.JSONDecoder().raw_decode(head, head.index("[", head.index('"added_tokens"')))
    for spelling in (token["content"] for token in tokens if _stands_for_no_text(token)):
        if spelling[1:2] == _MARK:
            return tokenizer  # has been through here
        given, hidden = (json.dumps(text, ensure_ascii=False) for text in (spelling, _hidden(spelling)))
        head, model = head.replace(given, hidden), model.replace(given, hidden)
    return head + key + model


def _stands_for_no_text(added_token: dict[str, Any]) -> bool:
    """Return True if llguidance takes an added token for a special one."""
    return added_token["special"] or (added_token["content"][:1], added_token["content"][-1:]) == ("<", ">")


def hidden_names(lark: str) -> str:
    """Rewrite a Lark grammar's named tokens (`<|im_end|>`) for a tokenizer with hidden ones."""
    return _LARK_PARTS.sub(lambda part: _hidden(part[0]) if part["name"] is not None else part[0], lark)


def shown_names(message: str) -> str:
    """Return a message about tokens, with their own names."""
    return message.replace(_MARK, "").replace("\\u{2060}", "")


def _hidden(spelling: str) -> str:
    return spelling[:1] + _MARK + spelling[1:]
