"""The tree as text, for people."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.cache.keys import TOKEN_BYTES, decode_tokens
from radixkv.cache.node import Node
from radixkv.cache.tree_nodes import TreeNodes

_SHOWN_TOKENS = 4


def show_tree(tree: TreeNodes, max_lines: int) -> str:
    """The tree as ASCII: one line per node with its tokens, blocks and holders. O(lines + depth)."""
    lines: list[str] = []
    stack: list[Iterator[Node]] = [iter(tree.roots.values())]
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
        elif len(lines) >= max_lines:
            lines.append("...")
            break
        else:
            lines.append(_line(node, len(stack) - 1))
            stack.append(node.each_child())
    return "\n".join(lines) if lines else "(empty)"


def _line(node: Node, level: int) -> str:
    if node.parent is None:
        return f"{node.space!r}"
    tokens = decode_tokens(node.key[: _SHOWN_TOKENS * TOKEN_BYTES])
    more = " .." if len(node.key) > _SHOWN_TOKENS * TOKEN_BYTES else ""
    marks = (f", {node.refs} refs" if node.refs else "") + (", pinned" if node.pins else "")
    shown = " ".join(map(str, tokens)) + more
    return f"{'  ' * level}{node.start}..{node.end} [{shown}] {len(node.blocks)} blocks{marks}"
