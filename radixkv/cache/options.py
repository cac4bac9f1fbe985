"""CacheOptions: what a cache is made with, checked, so that another one can be made like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from radixkv.cache.block_identity import HashFunction
from radixkv.errors import ConfigError


class CacheOptions(NamedTuple):
    """Arguments of `PrefixCache` that stay as they are: all but the policy, an object, and the quotas."""

    num_blocks: int
    block_size: int
    enabled: bool
    clock: Callable[[], float]
    ghost_blocks: int | None
    hash_function: HashFunction | None
    model: str
    pin_budget: float
    partial_reuse: bool
    explain: bool

    def check(self) -> None:
        """Raise ConfigError for an option that is out of range."""
        for name, value in (("num_blocks", self.num_blocks), ("block_size", self.block_size)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.num_blocks >= 2**31:
            raise ConfigError(f"num_blocks must be below 2**31, not {self.num_blocks}")
        ghosts = self.ghost_blocks
        if ghosts is not None and (type(ghosts) is not int or ghosts < 0):
            raise ConfigError(f"ghost_blocks must be an integer of at least 0, not {ghosts!r}")
        if not 0.0 <= self.pin_budget <= 1.0:
            raise ConfigError(f"pin_budget must be a share of the pool in [0, 1], not {self.pin_budget!r}")
