# SPDX-License-Identifier: Apache-2.0
"""PublicText: prefixes that namespaces share; `radixkv.tenancy.public_prefixes` has declared ones."""

from __future__ import annotations

from collections.abc import Collection


class PublicText:
    """The prefixes shared by all namespaces of one model and adapter; this base has none."""

    __slots__ = ()

    prefixes: Collection[bytes] = ()
    version = 0  # changes with each declaration

    def length_in(self, data: bytes) -> int:
        """Return the length in bytes of the longest public prefix of `data`."""
        return 0
