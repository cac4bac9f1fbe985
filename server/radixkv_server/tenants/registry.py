# SPDX-License-Identifier: Apache-2.0
"""TenantRegistry: keys, grants, usage and rate limits of all tenants, from the settings and a keys file.

The life of a request in a tenant's `Limiter` (token buckets for requests and tokens a minute, and a bound of
running requests):

1. `Limiter.enter` counts or refuses it before its body is read.
2. `RateReservation.expect` takes the tokens of the prompt and of the longest possible answer from the
   tenant's bucket, or refuses the request.
3. `RateReservation.end` returns unused tokens, or takes the tokens used beyond that.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from radixkv.cache.accounts import Quota, check_floors
from radixkv.engine.cache_client import CacheClient
from radixkv.errors import ConfigError, RadixKVError
from radixkv_server.errors import ApiError
from radixkv_server.tenants.api_keys import KeyRing
from radixkv_server.tenants.keys_file import KeysFile, read_keys_file
from radixkv_server.tenants.tenant import Account, Limits, Tenant

logger = logging.getLogger("radixkv.server")

#: Assumed tokens of an answer that has not ended and has no limit.
ASSUMED_ANSWER_TOKENS = 256

PERIOD_S = 60.0


class TokenBucket:
    """Holds up to `limit`, and refills at `limit` a minute; its level may be negative.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._seen = clock()

    def _fill(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._seen) * self.limit / PERIOD_S)
        self._seen = now
        return self._level

    def wait_for(self, amount: float) -> float:
        """Return the seconds until `amount` (at most the limit) can be taken; 0: now. O(1)."""
        return max(0.0, (amount - self._fill()) * PERIOD_S / self.limit)

    def take(self, amount: float) -> None:
        """Take an amount even if it is not there; a negative amount is returned to the bucket. O(1)."""
        self._level = min(self.limit, self._fill() - amount)

    def change_limit(self, limit: int) -> None:
        """Set another limit and scale the level with it. O(1)."""
        self._level = self._fill() * limit / self.limit
        self.limit = limit

    @property
    def remaining(self) -> int:
        """The amount that can be taken now."""
        return max(0, math.floor(self._fill() + 1e-9))

    @property
    def full_in_s(self) -> float:
        """Seconds until it is full."""
        return (self.limit - self._fill()) * PERIOD_S / self.limit


@dataclass(frozen=True, slots=True)
class LimitState:
    """A limit for the headers of an answer.

    Attributes:
        kind: `requests` or `tokens`.
        reset_s: seconds until the bucket is full.
    """

    kind: str
    limit: int
    remaining: int
    reset_s: float


def refusal(message: str, wait_s: float, *, code: str = "rate_limit_exceeded") -> ApiError:
    """Make a 429 with the time to wait."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(max(1, math.ceil(wait_s)))})


class Limiter:
    """Counts of one tenant's requests and tokens against its limits.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.change(limits)

    @property
    def num_running(self) -> int:
        """Requests that have entered and not left."""
        return self._running

    def change(self, limits: Limits) -> None:
        """Set other limits; past usage still counts."""
        self._limits = limits
        self._requests = self._changed(self._requests, limits.requests_per_minute)
        self._tokens = self._changed(self._tokens, limits.tokens_per_minute)

    def _changed(self, bucket: TokenBucket | None, limit: int | None) -> TokenBucket | None:
        if limit is None:
            return None
        if bucket is None:
            return TokenBucket(limit, self._clock)
        bucket.change_limit(limit)
        return bucket

    def enter(self) -> RateReservation:
        """Count a request that begins.

        Raises:
            ApiError: 429; too many run, or came in the last minute, or its tokens are used up.
        """
        most = self._limits.concurrency
        if most is not None and self._running >= most:
            raise refusal(
                f"Your limit is {most} request(s) at a time, and they are running. Wait for one to end.",
                1.0,
                code="concurrency_limit_exceeded",
            )
        for bucket, kind in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait = 0.0 if bucket is None else bucket.wait_for(1)
            if bucket is not None and wait > 0:
                raise refusal(
                    f"Your limit is {bucket.limit} {kind} a minute. Try again in {wait:.1f} s.", wait
                )
        if self._requests is not None:
            self._requests.take(1)
        self._running += 1
        return RateReservation(self)

    def expect(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Take the tokens of a request that is about to run; returns their number.

        It is at most the tokens of a minute, however long the answer may be.

        Raises:
            ApiError: 429; too few are left, or the prompt alone is longer than a minute's tokens.
        """
        bucket = self._tokens
        if bucket is None:
            return 0
        if prompt_tokens > bucket.limit:
            raise ApiError(
                429,
                f"The prompt has {prompt_tokens} tokens; your limit is {bucket.limit} tokens a minute, so "
                "that it can never run. Shorten it.",
                code="rate_limit_exceeded",
                headers={"x-should-retry": "false"},
            )
        wanted = min(bucket.limit, prompt_tokens + answer_tokens)
        wait = bucket.wait_for(wanted)
        if wait > 0:
            raise refusal(
                f"Your limit is {bucket.limit} tokens a minute; {bucket.remaining} are left and this request "
                f"asks for up to {wanted} (prompt {prompt_tokens}, answer up to {answer_tokens}). Try again "
                f"in {wait:.1f} s, or lower its limit on the answer.",
                wait,
            )
        bucket.take(wanted)
        return wanted

    def end(self, unused_tokens: int) -> None:
        """End a request and return its unused tokens; negative: it used more than expected."""
        self._running -= 1
        if self._tokens is not None:
            self._tokens.take(-unused_tokens)

    def state(self) -> list[LimitState]:
        """Return the limits with their remainders."""
        kinds = (("requests", self._requests), ("tokens", self._tokens))
        return [LimitState(k, b.limit, b.remaining, b.full_in_s) for k, b in kinds if b is not None]


class RateReservation:
    """A counted request of a tenant, from `Limiter.enter` to `end`."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._expected = 0
        self._has_left = False

    def expect(self, prompt_tokens: int, answer_tokens: int) -> None:
        """See `Limiter.expect`."""
        self._expected = self._limiter.expect(prompt_tokens, answer_tokens)

    def end(self, used_tokens: int | None) -> None:
        """End the request, once; None: its usage is unknown, and the expected tokens stay taken."""
        if not self._has_left:
            self._has_left = True
            self._limiter.end(0 if used_tokens is None else self._expected - used_tokens)

    def state(self) -> list[LimitState]:
        """See `Limiter.state`."""
        return self._limiter.state()


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

    Attributes:
        is_open: requests need no key, as neither keys nor a keys file are set.
        background: counts of all background requests, which no limit bounds.

    Raises:
        ConfigError: a key or the keys file is malformed, a key is given to two tenants, or is a sample.
    """

    def __init__(self, settings: KeySettings) -> None:
        self._own_keys = KeyRing.of(settings.api_keys, settings.admin_keys)
        self._path = settings.keys_file
        self._limiters: dict[str, Limiter] = {}
        self.background = Limiter(Limits(), time.monotonic)
        self._take(*self._read())

    def _read(self) -> tuple[KeysFile, KeyRing]:
        file = KeysFile() if self._path is None else read_keys_file(self._path)
        return file, self._own_keys.with_keys(file.keys)

    def _take(self, file: KeysFile, keys: KeyRing) -> None:
        self._file, self._accounts, self._keys = file, file.accounts, keys
        self.is_open = self._path is None and keys.is_open
        for name, limiter in self._limiters.items():
            limiter.change(self._accounts.get(name, Account()).limits)

    def warn_of_well_known_keys(self) -> None:
        """Log which users have keys that anybody can guess. Admins' are refused."""
        if names := self._keys.tenants_with_well_known_keys:
            logger.warning(
                "keys of these tenants are samples or placeholders that anybody can guess: %s; "
                "make others with `radixkv key new TENANT`",
                ", ".join(names),
            )

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
        self.warn_of_well_known_keys()
        gone = ", ".join(sorted(before.accounts.keys() - file.accounts.keys()))
        logger.warning(
            "%s is read again: %d tenants, before %d%s",
            self._path,
            len(file.accounts),
            len(before.accounts),
            f"; gone: {gone}" if gone else "",
        )
