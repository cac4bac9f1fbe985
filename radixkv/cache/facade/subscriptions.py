"""Subscriptions: joins the events to the tree while somebody listens; otherwise they cost nothing."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.insight.events import ChangeLog, Listener, Listeners
from radixkv.cache.radix_tree import RadixTree


class Subscriptions:
    """Who follows the tree of one cache."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.adopt(Listeners())

    def subscribe(self, listener: Listener, replay: bool) -> Callable[[], None]:
        """Tell a listener of what changes from now on; returns a function that ends that.

        Args:
            replay: first tell it what is there, O(blocks); what it raises then goes to the caller.
        """
        if replay:
            self._log.replay(list(self._tree.nodes()), listener)
        return self._log.listeners.add(listener)

    def adopt(self, listeners: Listeners) -> None:
        """Tell these of what changes from now on, and nobody else. O(1)."""
        self._log = ChangeLog(self._tree.block_bytes, listeners)
        listeners.on_change = self._join
        self._join(len(listeners) > 0)

    def hand_over(self) -> Listeners:
        """Those who listened: nobody does any more. O(1)."""
        listeners = self._log.listeners
        self.adopt(Listeners())
        return listeners

    def _join(self, any_listen: bool) -> None:
        self._tree.changes = self._log if any_listen else None
