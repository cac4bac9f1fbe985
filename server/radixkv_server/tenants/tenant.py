"""Tenants: who may ask what of the server, and how much. A tenant is a name that API keys belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from radixkv.cache.accounts import Quota

Role = Literal["admin", "user"]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody who asks.

    Attributes:
        name: whose part of the prefix cache its requests use; "" where no keys are asked for.
        role: an `admin` may look at and change what belongs to others or to all; a `user` only its own.
    """

    name: str = ""
    role: Role = "user"

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


#: Everybody, where no keys are asked for: whoever reaches the server owns it.
EVERYBODY = Tenant("", "admin")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may ask for; None: without a limit.

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
    """What a tenant is granted: limits on what it asks for, and its quota of the cache, in blocks."""

    limits: Limits = field(default_factory=Limits)
    quota: Quota = field(default_factory=Quota)
