# SPDX-License-Identifier: Apache-2.0
"""Owner: whose cached K/V, and what computed it. Callers name the owner, and build no namespace."""

from __future__ import annotations

from typing import NamedTuple


class Owner(NamedTuple):
    """Owner of a prompt's K/V.

    Attributes:
        tenant: who is served; bound by the server to the API key, never taken from a request's body.
        salt: divides the tenant's own space; chosen by its clients.
        adapter: identity of the LoRA adapter on top of the model's weights; empty: the base alone.

    >>> Owner("alice", "s").namespace("sha256:1f")
    ('alice', 's', '', 'sha256:1f')
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""

    def namespace(self, model: str) -> tuple[str, str, str, str]:
        """The namespace of the prefix cache, tenant first: policies and quotas find it there.

        The parts are framed in a tuple and never joined, so that no choice of strings by one tenant can name
        another's space.

        Args:
            model: fingerprint of configuration, weights and dtype; empty: unknown.
        """
        return (*self, model)


NOBODY = Owner()
