# SPDX-License-Identifier: Apache-2.0
"""API keys: the forms that users write (`KEY`, `NAME=KEY`), the stored digests, and their tenants."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv_server.tenants.tenant import Role, Tenant

ENV_VARIABLE = "RADIXKV_API_KEY"
ADMIN_ENV_VARIABLE = "RADIXKV_ADMIN_KEY"

TENANT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
# What follows the name must hold more than `=`, or it is the padding of a bare base64 key.
_NAMED_KEY = re.compile(rf"({TENANT_NAME.pattern})=(.*[^=].*)", re.DOTALL)
_DIGEST_PREFIX = "sha256:"
_STORED = re.compile(rf"{_DIGEST_PREFIX}([0-9a-fA-F]{{64}})")

#: Hashes of keys on this project's own pages; the text of the second key is not known any more.
_DOCUMENTED_HASHES = (
    "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    "ffe1eabe048697bf837b93a8ec684db51b9891236458c8a4d397883c8daa54d2",
)
#: Keys that pages of this and of other servers show as samples or placeholders, and that clients send where
#: none is needed. Written as here, in capitals, or with a capital first letter.
_WELL_KNOWN_KEYS = """
abc abcd abc123 abcdef 123 1234 12345 123456 xxx xxxx xxxxx none null nil token-abc123 token_abc123 token
empty no-key nokey no_key none-needed not-needed not_needed notneeded not-required unused ignored
any-key anything dummy dummy-key dummy_key dummykey fake fake-key fake_key fakekey example example-key
sample sample-key placeholder changeme change-me change_me replaceme replace-me todo password secret
s3cret my-secret my-secret-key super-secret super-secret-key supersecret key api-key api_key apikey
my-key my_key mykey my-api-key my_api_key myapikey my-anthropic-api-key your-key your_key your-api-key
your_api_key yourapikey your-openai-api-key your-anthropic-api-key your-secret-key your-admin-key
your_admin_key my-admin-key my_admin_key sk sk- sk-1234 sk-12345 sk-123456 sk-123 sk-abc sk-abc123
sk-test sk-xxx sk-xxxx sk-dummy sk-fake sk-none sk-empty sk-local sk-key sk-your-key sk-your-api-key
sk-no-key sk-no-key-required no-key-required sk-ant-xxx sk-ant-your-key rk rk- rk-... sk-... ... ollama
lm-studio lmstudio llama-cpp llama.cpp vllm sglang litellm openai anthropic radixkv <key> <your-key>
<api-key> <your-api-key> <admin-key> $key ${key} $api_key $admin_key ${admin_key} $openai_api_key
$anthropic_api_key $radixkv_api_key $radixkv_admin_key
"""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An accepted key: its tenant and the digest of the secret, which itself is not kept."""

    tenant: Tenant
    digest: bytes = field(repr=False)

    @property
    def is_documented(self) -> bool:
        """True if it has ever stood on a page of this project, as a hash."""
        return self.digest in _DOCUMENTED_DIGESTS

    @property
    def is_well_known(self) -> bool:
        """True for samples and placeholders, such as `token-abc123` and `EMPTY`: anybody can present them."""
        return self.digest in _WELL_KNOWN_DIGESTS


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 of a secret, so that secrets of any length compare in the same time."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


_DOCUMENTED_DIGESTS = frozenset(bytes.fromhex(text) for text in _DOCUMENTED_HASHES)
_WELL_KNOWN_DIGESTS = _DOCUMENTED_DIGESTS | {
    digest_of(text) for word in _WELL_KNOWN_KEYS.split() for text in (word, word.upper(), word.capitalize())
}


def new_secret() -> str:
    """Make a key of 256 random bits, so that its plain SHA-256 can't be inverted."""
    return f"rk-{secrets.token_urlsafe(32)}"


def stored_form(secret: str) -> str:
    """Return the form of a key in a keys file.

    >>> stored_form("s3cret")[:15]
    'sha256:1ec1c26b'
    """
    return _DIGEST_PREFIX + digest_of(secret).hex()


def stored_digest(text: str) -> bytes | None:
    """Return the digest in `sha256:` and 64 hexadecimal digits; None: the text has another form."""
    found = _STORED.fullmatch(text)
    return bytes.fromhex(found[1]) if found else None


def split_api_key(text: str) -> tuple[str | None, str]:
    """Split `NAME=KEY` or `KEY` into (name or None, secret).

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
            "an API key must be printable ASCII without spaces, given as KEY or NAME=KEY (flags --api-key, "
            f"--admin-key, --api-key-file, or {ENV_VARIABLE} and {ADMIN_ENV_VARIABLE})"
        )
    digest = digest_of(secret)
    return ApiKey(Tenant(name or f"key-{digest.hex()[:12]}", role), digest)


def keys_from_environment(
    environ: Mapping[str, str] = os.environ, variable: str = ENV_VARIABLE
) -> tuple[str, ...]:
    """Return the keys in RADIXKV_API_KEY (or another variable), separated by commas or white space."""
    return tuple(part for part in re.split(r"[,\s]+", environ.get(variable, "")) if part)


def keys_from_file(path: str | Path) -> tuple[str, ...]:
    """Return the keys in a file, one `KEY` or `NAME=KEY` a line, without empty lines and # comments.

    Raises:
        ConfigError: the file can't be read, or has no key.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key; write KEY or NAME=KEY, one a line")
    return keys


class KeyRing:
    """The accepted keys. Without any, all requests belong to `EVERYBODY` and need no key.

    Raises:
        ConfigError: a key is given to two tenants or with two roles, an admin's key is well known, or a key
            has stood on a page of this project.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = list(keys)
        owners: dict[bytes, Tenant] = {}
        for key in self._keys:
            owner = owners.setdefault(key.digest, key.tenant)
            if owner.name != key.tenant.name:
                raise ConfigError(f"the same API key is given to {owner.name!r} and {key.tenant.name!r}")
            if owner.role != key.tenant.role:
                raise ConfigError(f"an API key of {owner.name!r} is given as an admin's and as a user's")
            if key.is_documented or (key.tenant.is_admin and key.is_well_known):
                role = " --admin" if key.tenant.is_admin else ""
                raise ConfigError(
                    f"a key of {owner.name!r} is a sample or a placeholder that anybody can guess; "
                    f"make one that nobody can: `radixkv key new {owner.name}{role}`"
                )

    @classmethod
    def of(cls, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> KeyRing:
        """Make a ring of the keys of users and admins, in the forms of `parse_api_key`.

        Raises:
            ConfigError: a key is malformed, or given to two tenants or with two roles.
        """
        return cls([*map(parse_api_key, keys), *(parse_api_key(text, "admin") for text in admin_keys)])

    def with_keys(self, keys: Iterable[ApiKey]) -> KeyRing:
        """Make a ring with further keys.

        Raises:
            ConfigError: a key is given to two tenants or with two roles.
        """
        return KeyRing([*self._keys, *keys])

    @property
    def is_open(self) -> bool:
        return not self._keys

    @property
    def tenants(self) -> list[str]:
        """The names of all tenants with a key."""
        return [key.tenant.name for key in self._keys]

    @property
    def tenants_with_well_known_keys(self) -> list[str]:
        """The names of tenants with a key that anybody can guess; all are users, as admins' are refused."""
        return sorted({key.tenant.name for key in self._keys if key.is_well_known})

    def tenant_of(self, secret: str) -> Tenant | None:
        """Return the tenant that owns `secret`, or None.

        All digests are compared, each in constant time, so that the time tells nothing about the keys.
        """
        digest = digest_of(secret)
        found: Tenant | None = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.tenant
        return found
