# SPDX-License-Identifier: Apache-2.0
"""The policies that settings name: an unknown one is refused before anything is loaded or started."""

from __future__ import annotations

from radixkv.cache.eviction.registry import make_eviction_policy
from radixkv.engine.config import EngineConfig
from radixkv.scheduling.policy import make_policy


def check_policies(config: EngineConfig) -> None:
    """Raise what making its policies raises.

    Raises:
        ConfigError: no policy has that name, or a package that it needs is not installed.
    """
    make_policy(config.scheduling_policy, weights=config.namespace_weights)
    make_eviction_policy(config.eviction_policy)
