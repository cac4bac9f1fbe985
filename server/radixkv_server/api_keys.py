"""API keys: as users write them (`KEY`, `NAME=KEY`, the environment variable), and who owns which."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from radixkv.errors import ConfigError
from radixkv_server.tenants import Role, Tenant

ENV_VARIABLE = "RADIXKV_API_KEY"

# What follows the name must hold more than `=`, or it is the padding of a bare base64 key.
_NAMED_KEY = re.compile(r"([A-Za-z][A-Za-z0-9_.-]{0,63})=(.*[^=].*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One accepted key: whose it is and the digest of the secret (the secret is not kept)."""

    tenant: Tenant
    digest: bytes = field(repr=False)


def digest_of(secret: str) -> bytes:
    """SHA-256 of a secret, so that secrets of any length compare in the same time."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def split_api_key(text: str) -> tuple[str | None, str]:
    """`NAME=KEY` or `KEY` as (name or None, secret).

    >>> split_api_key("team-a=s3cret"), split_api_key("c2VjcmV0=="), split_api_key("s3cret")
    (('team-a', 's3cret'), (None, 'c2VjcmV0=='), (None, 's3cret'))
    """
    named = _NAMED_KEY.fullmatch(text)
    return (named.group(1), named.group(2)) if named else (None, text)


def parse_api_key(text: str, role: Role = "user") -> ApiKey:
    """Parse `NAME=KEY` or `KEY`; a bare key gets a name derived from its digest, stable over restarts.

    Raises:
        ConfigError: the key is empty or holds white space or characters beyond ASCII.
    """
    name, secret = split_api_key(text)
    if not secret or not all(33 <= ord(char) <= 126 for char in secret):
        raise ConfigError(
            "an API key must be printable ASCII without spaces, given as KEY or NAME=KEY "
            f"(flags --api-key and --admin-key, or {ENV_VARIABLE})"
        )
    digest = digest_of(secret)
    return ApiKey(Tenant(name or f"key-{digest.hex()[:12]}", role), digest)


def keys_from_environment(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys in RADIXKV_API_KEY, separated by commas or white space."""
    return tuple(part for part in re.split(r"[,\s]+", environ.get(ENV_VARIABLE, "")) if part)


class KeyRing:
    """The accepted keys. Without any, everyone is `EVERYBODY` and no key is asked for.

    Args:
        keys: of users, as `parse_api_key` takes them.
        admin_keys: of admins.

    Raises:
        ConfigError: a key is malformed, or given to two tenants or with two roles.
    """

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        self._keys = [
            *(parse_api_key(text) for text in keys),
            *(parse_api_key(text, "admin") for text in admin_keys),
        ]
        self._check_owners()

    def _check_owners(self) -> None:
        owners: dict[bytes, Tenant] = {}
        for key in self._keys:
            owner = owners.setdefault(key.digest, key.tenant)
            if owner.name != key.tenant.name:
                raise ConfigError(f"the same API key is given to {owner.name!r} and {key.tenant.name!r}")
            if owner.role != key.tenant.role:
                raise ConfigError(f"an API key of {owner.name!r} is given as an admin's and as a user's")

    @property
    def is_open(self) -> bool:
        return not self._keys

    def tenant_of(self, secret: str) -> Tenant | None:
        """The tenant who owns `secret`, or None.

        Digests of fixed length are compared in constant time, and all of them, so that the time taken
        says nothing about the keys.
        """
        digest = digest_of(secret)
        found: Tenant | None = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.tenant
        return found
