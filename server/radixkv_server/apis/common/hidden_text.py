# SPDX-License-Identifier: Apache-2.0
"""Text that a client returns unchanged in the next turn: encoded, not encrypted, with a prefix."""

from __future__ import annotations

import base64
import binascii


def hide(text: str, mark: str) -> str:
    """Encode a text for clients, who send it back."""
    return mark + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode("ascii")


def unhide(given: object, mark: str) -> str:
    """Decode the result of `hide`; empty for anything else."""
    if not isinstance(given, str) or not given.startswith(mark):
        return ""
    try:
        return base64.b64decode(given[len(mark) :], altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""
