# SPDX-License-Identifier: Apache-2.0
"""Open a publisher from the value of `--kv-events`; its dependencies are imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.cluster.events.spec import parse_events
from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.cluster.events.publisher import EventPublisher


def open_events(text: str | None) -> EventPublisher | None:
    """A publisher with its sockets open; None: nothing is published.

    Raises:
        ConfigError: it can't be, with the reason; or the packages are missing.
    """
    if text is None:
        return None
    spec = parse_events(text)
    try:
        from radixkv.cluster.events.publisher import EventPublisher  # optional: the extra `events`
    except ImportError as error:
        raise ConfigError(f"--kv-events: {error}; {install_command('events')}") from None
    return EventPublisher(spec)
