# SPDX-License-Identifier: Apache-2.0
"""TenantRegistry: keys, grants and usage of all tenants, from the settings and a keys file."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from radixkv.cache.accounts import Quota
from radixkv.engine.cache_client import CacheClient
from radixkv.errors import ConfigError, RadixKVError
from radixkv.tenancy.quota import check_floors
from radixkv_server.tenants.api_keys import KeyRing
from radixkv_server.tenants.keys_file import KeysFile, read_keys_file
from radixkv_server.tenants.rate_limits import Limiter
from radixkv_server.tenants.tenant import Account, Tenant

logger = logging.getLogger("radixkv.server")


class KeySettings(Protocol):
    """Keys of users, keys of admins, and the keys file, if any."""

    @property
    def api_keys(self) -> Sequence[str]: ...

    @property
    def admin_keys(self) -> Sequence[str]: ...

    @property
    def keys_file(self) -> str | None: ...


class TenantRegistry:
    """The keys and grants of one server, from its settings and its keys file.

    Args:
        settings: keys of users and admins, and the keys file, if any.

    Raises:
        ConfigError: a key or the keys file is malformed, or a key is given to two tenants.
    """

    def __init__(self, settings: KeySettings) -> None:
        self._own_keys = KeyRing.of(settings.api_keys, settings.admin_keys)
        self._path = settings.keys_file
        self._limiters: dict[str, Limiter] = {}
        self._take(*self._read())

    def _read(self) -> tuple[KeysFile, KeyRing]:
        file = KeysFile() if self._path is None else read_keys_file(self._path)
        return file, self._own_keys.with_keys(file.keys)

    def _take(self, file: KeysFile, keys: KeyRing) -> None:
        self._file, self._accounts, self._keys = file, file.accounts, keys
        for name, limiter in self._limiters.items():
            limiter.change(self._accounts.get(name, Account()).limits)

    @property
    def is_open(self) -> bool:
        """True if requests need no key: neither keys nor a keys file are set."""
        return self._path is None and self._keys.is_open

    def tenant_of(self, secret: str) -> Tenant | None:
        """Return the tenant that owns a key, or None, in a time that does not depend on the key."""
        return self._keys.tenant_of(secret)

    def num_running(self, tenant: Tenant) -> int:
        """Count the running and waiting generations of a tenant; for an admin, of all tenants."""
        if tenant.is_admin:
            return sum(limiter.num_running for limiter in self._limiters.values())
        return self.limiter_of(tenant).num_running

    def limiter_of(self, tenant: Tenant) -> Limiter:
        """Return the tenant's counts against its limits. O(1)."""
        limiter = self._limiters.get(tenant.name)
        if limiter is None:
            limits = self._accounts.get(tenant.name, Account()).limits
            limiter = self._limiters[tenant.name] = Limiter(limits, time.monotonic)
        return limiter

    def may_use(self, tenant: Tenant, adapter: str) -> bool:
        """Return whether a tenant may use the LoRA adapter of that name. O(1)."""
        allowed = self._accounts.get(tenant.name, Account()).adapters
        return tenant.is_admin or allowed is None or adapter in allowed

    def has_ceiling(self, tenant: Tenant) -> bool:
        """Return whether the tenant's share of the cache is bounded. O(1)."""
        account = self._accounts.get(tenant.name)
        return account is not None and account.quota.ceiling is not None

    @property
    def quotas(self) -> dict[str, Quota]:
        """The cache quota of each tenant."""
        return self._quotas(self._accounts)

    def _quotas(self, accounts: Mapping[str, Account]) -> dict[str, Quota]:
        """Return the quotas of all tenants by name.

        Tenants that the file does not name get an unbounded quota: their blocks are counted separately from
        the first on, so that a later version of the file can bound them.
        """
        unbounded = dict.fromkeys(self._own_keys.tenants, Quota())
        return unbounded | {name: account.quota for name, account in accounts.items()}

    def check_floors(self, num_blocks: int | None) -> None:
        """Make sure, before a model is loaded, that a pool of `num_blocks` (None: unknown) keeps all floors.

        Raises:
            ConfigError: the floors exceed the pool.
        """
        if num_blocks is not None:
            check_floors((account.quota for account in self._accounts.values()), num_blocks)

    async def apply_quotas(self, cache: CacheClient) -> None:
        """Hand the quotas to the cache, if there is a keys file.

        Raises:
            ConfigError: their floors together exceed the pool.
        """
        if self._path is not None:
            await cache.set_quotas(self.quotas)

    def _check_follows(self, file: KeysFile, keys: KeyRing) -> None:
        try:
            file.check_follows(self._file)
            if keys.is_open and not self._keys.is_open:
                raise ConfigError("with it nobody would have a key any more; keep one, at least an admin's")
        except ConfigError as error:
            raise ConfigError(f"--keys-file {self._path}: {error}") from None

    async def reload(self, cache: CacheClient) -> None:
        """Read the keys file again: keys, limits and quotas. On any error, nothing changes."""
        before = self._file
        try:
            file, keys = self._read()
            self._check_follows(file, keys)
            await cache.set_quotas(self._quotas(file.accounts))
        except RadixKVError as error:
            logger.error("the keys are not reloaded and stay as they were: %s", error)
            return
        self._take(file, keys)
        gone = ", ".join(sorted(before.accounts.keys() - file.accounts.keys()))
        logger.warning(
            "%s is read again: %d tenants, before %d%s",
            self._path,
            len(file.accounts),
            len(before.accounts),
            f"; gone: {gone}" if gone else "",
        )
