# SPDX-License-Identifier: Apache-2.0
"""The tree as JSON: the heaviest nodes, and the nodes that contain a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from radixkv.cache.reporting.tree_walk import CachedNode, TreeSnapshot
from radixkv_server.activity.node_names import NodeNames
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.dialect import Json

#: An adapter that has been unloaded, or that the caller may not use any more.
UNNAMED = "unknown"
SNIPPET_CHARS = 60  # on each side of a text that was found


class TreeJson:
    """View of a snapshot with the caller's rights.

    Subtrees are as complete as the snapshot. Users see public nodes only above nodes of their own, and only
    their size.

    Args:
        adapters: names that the caller may know, by the adapters' identities.
    """

    def __init__(
        self,
        snapshot: TreeSnapshot,
        caller: Caller,
        names: NodeNames,
        text_of: Callable[[Sequence[int]], str],
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._caller = caller
        self._names = names
        self._text_of = text_of
        self._adapters = adapters or {}
        self._snapshot = snapshot
        self._tokens: dict[int, int] = {}  # of the subtrees
        self._children: dict[int, int] = {}
        own: set[int] = set()
        for node in reversed(snapshot.nodes):  # children first
            total = self._tokens[node.id] = self._tokens.get(node.id, 0) + node.num_tokens
            if node.tenant is not None or node.id in own:
                own.add(node.id)
                if node.parent is not None:
                    own.add(node.parent)
            if node.parent is not None:
                self._tokens[node.parent] = self._tokens.get(node.parent, 0) + total
                self._children[node.parent] = self._children.get(node.parent, 0) + 1
        self._nodes = [node for node in snapshot.nodes if caller.is_admin or node.id in own]
        ranked = sorted(
            (node.eviction_rank, node.id)
            for node in self._nodes
            if node.eviction_rank is not None and (caller.is_admin or node.tenant is not None)
        )
        self._ranks = {node_id: rank for rank, (_, node_id) in enumerate(ranked, 1)}

    def heaviest(self, limit: int, depth: int) -> Json:
        """Return the nodes with the most tokens in and below them, each after its parent."""
        nodes = [node for node in self._nodes if node.level < depth]
        nodes.sort(key=lambda node: (-self._tokens[node.id], node.level, node.id))
        shown = nodes[:limit]
        return {
            "object": "cache.tree",
            "nodes": [self._node(node) for node in shown],
            "totals": self._totals(),
            "complete": self._snapshot.is_complete,
            "eviction_order_exact": self._snapshot.ranks_are_exact,
        }

    def _totals(self) -> Json:
        own = [node for node in self._nodes if self._caller.is_admin or node.tenant is not None]
        return {
            "nodes": len(own),
            "tokens": sum(node.num_tokens for node in own),
            "blocks": sum(node.num_blocks for node in own),
            "held_blocks": sum(node.num_blocks for node in own if _state(node) == "held"),
            "pinned_blocks": sum(node.num_blocks for node in own if _state(node) == "pinned"),
            "evictable_blocks": sum(node.num_blocks for node in own if _state(node) == "cached"),
        }

    def _node(self, node: CachedNode) -> Json:
        is_told = self._caller.is_admin or node.tenant is not None
        shown: Json = {
            "id": self._names.of(node.id),
            "parent": None if node.parent is None else self._names.of(node.parent),
            "level": node.level,
            "start": node.start,
            "tokens": node.num_tokens,
            "blocks": node.num_blocks,
            "public": node.tenant is None,
            "subtree_tokens": self._tokens[node.id],
            "children": self._children.get(node.id, 0),
            "state": _state(node) if is_told else None,
            "leases": node.num_leases if is_told else None,
            "hits": node.num_hits if is_told else None,
            "idle_s": round(node.idle_s, 1) if is_told and node.idle_s is not None else None,
            "eviction_rank": self._ranks.get(node.id),
            "adapter": self._adapters.get(node.adapter, UNNAMED) if node.adapter else None,
            "text": self._text(node),
        }
        if node.checkpoints and is_told:
            shown["checkpoints"] = [
                {"tokens": end, "hits": hits, "superseded": superseded}
                for end, hits, superseded in sorted(node.checkpoints)
            ]
        if self._caller.is_admin:
            shown["tenant"], shown["cache_salt"] = node.tenant, node.salt
        return shown

    def _text(self, node: CachedNode) -> str | None:
        if not self._caller.may_read(node.tenant, node.salt):
            return None
        return self._text_of(node.token_ids)

    def search(self, wanted: str, limit: int) -> Json:
        """Return the nodes whose text, continued from the node above, contains `wanted` in any case."""
        sought = wanted.casefold()
        tails: dict[int, str] = {}  # the end of each node's text, with what is before it
        found: list[Json] = []
        num_found = 0
        for node in self._nodes:
            if not self._caller.may_read(node.tenant, node.salt):
                continue
            text = self._text_of(node.token_ids)
            before = tails.get(node.parent, "") if node.parent is not None else ""
            joined = before + text
            tails[node.id] = joined[-(len(wanted) - 1 + SNIPPET_CHARS) :]
            # What lies in the parent's part alone was found there.
            begin = max(0, len(before) - len(wanted) + 1)
            place = joined.casefold().find(sought, begin)
            if place < 0:
                continue
            num_found += 1
            if len(found) < limit:
                end = place + len(wanted)
                snippet = joined[max(0, place - SNIPPET_CHARS) : end + SNIPPET_CHARS]
                found.append({**self._node(node), "text": text[:400], "snippet": snippet})
        return {
            "object": "cache.search",
            "search": wanted,
            "found": num_found,
            "nodes": found,
            "complete": self._snapshot.is_complete,
        }


def _state(node: CachedNode) -> str:
    return "pinned" if node.is_pinned else "held" if node.is_held else "cached"
