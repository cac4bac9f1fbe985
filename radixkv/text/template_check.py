# SPDX-License-Identifier: Apache-2.0
"""A chat template that a user gives, tried before anything is loaded for it."""

from __future__ import annotations

from typing import Any

from radixkv.errors import ConfigError


def check_chat_template(hf_tokenizer: Any, template: str) -> None:
    """Refuse Jinja text that can't be parsed; its effect on messages is only seen with messages.

    Args:
        hf_tokenizer: a transformers tokenizer; its own way of reading templates is what counts.

    Raises:
        ConfigError: names the line and the mistake there.
    """
    from jinja2 import TemplateSyntaxError

    try:
        hf_tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], chat_template=template, tokenize=False
        )
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message} "
            "(flag --chat-template)"
        ) from None
    except Exception:  # a program may refuse this conversation, and take another
        return
