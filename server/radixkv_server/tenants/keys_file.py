# SPDX-License-Identifier: Apache-2.0
"""The keys file: TOML with the tenants, their hashed keys, limits and quotas.

[tenants.alice]
keys = ["sha256:<hash>"]       # radixkv key new alice
role = "user"                  # or "admin"
requests_per_minute = 60
tokens_per_minute = 100_000
concurrency = 8
floor_blocks = 500             # other tenants can't evict its cached blocks below this number
ceiling_blocks = 4_000
adapters = ["sql"]             # the LoRA adapters that it may use; without this line: all
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.cache.accounts import Quota
from radixkv.errors import ConfigError
from radixkv_server.tenants.api_keys import TENANT_NAME, ApiKey, stored_digest
from radixkv_server.tenants.tenant import Account, Limits, Tenant

_NUMBERS = {  # name -> least value
    "requests_per_minute": 1,
    "tokens_per_minute": 1,
    "concurrency": 1,
    "floor_blocks": 0,
    "ceiling_blocks": 1,
}
_NAMES = ("keys", "role", "adapters", *_NUMBERS)


@dataclass(frozen=True, slots=True)
class KeysFile:
    """Contents of a keys file: the keys, and the grants of each tenant.

    Attributes:
        bare: tenants whose tables are empty.
    """

    keys: tuple[ApiKey, ...] = ()
    accounts: Mapping[str, Account] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()

    def check_follows(self, before: KeysFile) -> None:
        """Make sure that this is a later version of `before`, not a truncated one.

        Raises:
            ConfigError: it is empty now, or ends with the mere name of a tenant that had keys.
        """
        if before.accounts and not self.accounts:
            raise ConfigError("it is empty now; to take all keys away, leave the tenants with keys = []")
        cut = sorted(self.bare & {key.tenant.name for key in before.keys})
        if cut:
            raise ConfigError(
                f"[tenants.{cut[0]}] is empty now, as if the file had been cut; to take its keys away, write "
                "keys = []"
            )


def read_keys_file(path: str | Path) -> KeysFile:
    """Read and check a keys file.

    Raises:
        ConfigError: the file can't be read, is no TOML, or has an unknown name or a value out of range; names
            the file, the tenant and the fault, and never prints a key.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--keys-file {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return _parse(tables)
    except ConfigError as error:
        raise ConfigError(f"--keys-file {path}: {error}") from error


def _parse(tables: Mapping[str, Any]) -> KeysFile:
    _refuse_unknown(tables, ("tenants",), "the file")
    tenants = tables.get("tenants", {})
    if not isinstance(tenants, dict) or not all(isinstance(table, dict) for table in tenants.values()):
        raise ConfigError("give each tenant a table, as [tenants.alice]")
    keys: list[ApiKey] = []
    accounts: dict[str, Account] = {}
    for name, table in tenants.items():
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(
                f"{name[:80]!r} is no name of a tenant: a letter, then at most 63 letters, digits, _ . and -"
            )
        where = f"[tenants.{name}]"
        _refuse_unknown(table, _NAMES, where)
        keys += _keys(table, name, where)
        accounts[name] = _account(table, where)
    return KeysFile(tuple(keys), accounts, frozenset(name for name, table in tenants.items() if not table))


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where} has {name[:80]!r}, which is not known; {hint}")


def _keys(table: Mapping[str, Any], name: str, where: str) -> list[ApiKey]:
    role, texts = table.get("role", "user"), table.get("keys", [])
    if role not in ("admin", "user"):
        raise ConfigError(f'{where} role must be "admin" or "user", not {role!r}')
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f'{where} keys must be a list of texts, as ["sha256:..."]')
    tenant = Tenant(name, role)
    keys = []
    for text in texts:
        digest = stored_digest(text)
        if digest is None:
            raise ConfigError(
                f"{where} has a key in plain text (or a mistyped hash): write what `radixkv key hash` makes "
                f"of it, or make a new one with `radixkv key new {name}`"
            )
        keys.append(ApiKey(tenant, digest))
    return keys


def _account(table: Mapping[str, Any], where: str) -> Account:
    numbers: dict[str, int | None] = dict.fromkeys(_NUMBERS)
    for name, least in _NUMBERS.items():
        value = table.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ConfigError(f"{where} {name} must be a whole number of at least {least}, not {value!r}")
        numbers[name] = value
    floor, ceiling = numbers.pop("floor_blocks") or 0, numbers.pop("ceiling_blocks")
    if ceiling is not None and ceiling < floor:
        raise ConfigError(f"{where} ceiling_blocks ({ceiling}) is below floor_blocks ({floor})")
    adapters = table.get("adapters")
    if adapters is not None and not (
        isinstance(adapters, list) and all(isinstance(name, str) and name for name in adapters)
    ):
        raise ConfigError(f'{where} adapters must be a list of names, as ["sql"], not {adapters!r:.200}')
    return Account(
        Limits(**numbers), Quota(floor, ceiling), None if adapters is None else frozenset(adapters)
    )
