"""Tenant: who may ask what of the server. A tenant is a name that API keys belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["admin", "user"]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody who is served.

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
