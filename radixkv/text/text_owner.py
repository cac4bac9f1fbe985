# SPDX-License-Identifier: Apache-2.0
"""The owner of texts that are encoded: no one else may find, or time, its tokens."""

from __future__ import annotations

from contextvars import ContextVar

Owner = tuple[str, ...]

#: Owner of a text to be encoded: tenant and salt. A server sets it for each request.
text_owner: ContextVar[Owner] = ContextVar("text_owner", default=())
