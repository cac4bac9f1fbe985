# SPDX-License-Identifier: Apache-2.0
"""Tenants with their limits and quotas. A tenant is a name that API keys belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from radixkv.cache.accounts import Quota

Role = Literal["admin", "user"]


@dataclass(frozen=True, slots=True)
class Tenant:
    """The sender of a request.

    Attributes:
        name: names its part of the prefix cache; "" where no keys are needed.
        role: an `admin` may see and change the data of all tenants; a `user` only its own.
    """

    name: str = ""
    role: Role = "user"

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


#: The tenant of all requests where no keys are needed: any client that reaches the server owns it.
EVERYBODY = Tenant("", "admin")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant's requests; None: no limit.

    Attributes:
        requests_per_minute: requests that generate.
        tokens_per_minute: tokens of prompts and answers, cached ones included.
        concurrency: requests at a time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """Grants of a tenant.

    Attributes:
        limits: of its requests.
        quota: of the cache, in blocks.
        adapters: names of the LoRA adapters that it may use; None: all.
    """

    limits: Limits = field(default_factory=Limits)
    quota: Quota = field(default_factory=Quota)
    adapters: frozenset[str] | None = None
