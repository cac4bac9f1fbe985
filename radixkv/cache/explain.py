"""Why a prompt missed: MissReport, and how its reason is found.

The reasons, in the order in which they are tried for the first token that was not found:

    hit            nothing was missing but the one token that is always computed
    skipped        the caller, or the cache's settings, asked not to look
    partial_block  the tokens are cached, but sharing a part of a block was not possible
    evicted        the block was here and was evicted to make room
    expired        the same, after a pin on it had run out
    reset          the same, by `reset` or because a failed step withdrew it
    namespace      cached, but under another namespace (told to administrators only)
    diverged       another continuation of the same prefix is cached
    first_seen     nothing that begins like this has been here, as far as the ghost index remembers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from radixkv.cache.keys import TOKEN_BYTES, decode_tokens

if TYPE_CHECKING:
    from radixkv.cache.node import Space
    from radixkv.cache.prefix_cache import PrefixCache
    from radixkv.cache.radix_tree import Walk

Reason = Literal[
    "hit",
    "skipped",
    "partial_block",
    "evicted",
    "expired",
    "reset",
    "namespace",
    "diverged",
    "first_seen",
]
REASONS: tuple[Reason, ...] = (
    "hit",
    "skipped",
    "partial_block",
    "evicted",
    "expired",
    "reset",
    "namespace",
    "diverged",
    "first_seen",
)
CACHE_IS_OFF = "prefix caching is off"
CONTEXT_TOKENS = 8  # tokens shown after the place where two prompts part


class MissReport:
    """How much of a prompt was found, and why not the rest. Small: text is composed on demand.

    Attributes:
        reason: one of `REASONS`.
        num_prompt_tokens: length of the prompt.
        num_hit_tokens: leading tokens found; for a lease at most the prompt's length - 1.
        diverged_at: index of the first token that differs from what is cached; None unless `diverged`.
        age_s: seconds since the first missing block was removed, for `evicted`, `expired` and `reset`.
        evicted_by: what removed it, e.g. `capacity`, `quota`, `evict()`, `reset()`; None otherwise.
        skipped: why no lookup was made, for `skipped`.
    """

    __slots__ = (
        "_cached",
        "_new",
        "age_s",
        "diverged_at",
        "evicted_by",
        "num_hit_tokens",
        "num_prompt_tokens",
        "reason",
        "skipped",
    )

    def __init__(
        self,
        reason: Reason,
        num_prompt_tokens: int,
        num_hit_tokens: int,
        diverged_at: int | None = None,
        cached_after: bytes | bytearray = b"",
        new_after: bytes = b"",
        age_s: float | None = None,
        evicted_by: str | None = None,
        skipped: str | None = None,
    ) -> None:
        self.reason = reason
        self.num_prompt_tokens = num_prompt_tokens
        self.num_hit_tokens = num_hit_tokens
        self.diverged_at = diverged_at
        self._cached = cached_after
        self._new = new_after
        self.age_s = age_s
        self.evicted_by = evicted_by
        self.skipped = skipped

    @property
    def cached_tokens_after(self) -> list[int]:
        """What the cache holds from `diverged_at` on (a few tokens); empty unless `diverged`."""
        return decode_tokens(self._cached)

    @property
    def new_tokens_after(self) -> list[int]:
        """What the prompt holds from `diverged_at` on (a few tokens); empty unless `diverged`."""
        return decode_tokens(self._new)

    @property
    def num_missed_tokens(self) -> int:
        """Prompt tokens that must be computed."""
        return self.num_prompt_tokens - self.num_hit_tokens

    @property
    def detail(self) -> str:
        """The report as one sentence."""
        found = f"{self.num_hit_tokens} of {self.num_prompt_tokens} tokens were cached"
        if self.reason == "hit":
            return f"{found}; nothing else was missing."
        if self.reason == "skipped":
            return f"The cache was not consulted: {self.skipped}."
        if self.reason == "partial_block":
            return f"{found}; the next ones are, too, but their part of a block could not be shared."
        if self.reason in ("evicted", "expired", "reset"):
            what = {
                "evicted": "were evicted",
                "expired": "were evicted after their pin had expired",
                "reset": "were forgotten",
            }[self.reason]
            return f"{found}; the next ones {what} {self.age_s:.1f} s ago ({self.evicted_by})."
        if self.reason == "namespace":
            return f"{found}; the next ones are cached under another namespace."
        if self.reason == "diverged":
            return (
                f"{found}; at token {self.diverged_at} the prompt goes on with {self.new_tokens_after}, "
                f"the cached one with {self.cached_tokens_after}."
            )
        return f"{found}; the rest has not been seen before."

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "reason": self.reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_hit_tokens": self.num_hit_tokens,
            "diverged_at": self.diverged_at,
            "cached_tokens_after": self.cached_tokens_after,
            "new_tokens_after": self.new_tokens_after,
            "age_s": self.age_s,
            "evicted_by": self.evicted_by,
            "skipped": self.skipped,
            "detail": self.detail,
        }

    def __repr__(self) -> str:
        return f"MissReport({self.reason}: {self.num_hit_tokens} of {self.num_prompt_tokens} tokens hit)"


class PendingReport:
    """What a report needs to know of the moment of the acquire; the rest is looked up when it is read.

    Nothing is lost by waiting: the block that a lease missed is its own from then on, so that it can't be
    evicted (again) before the lease ends, and later removals are told apart by their time.
    """

    __slots__ = ("at", "cached", "cached_after", "data", "depth", "found", "mark", "seed", "skip")

    def __init__(
        self,
        data: bytes,
        seed: int,
        depth: int,
        found: int,
        cached: int,
        cached_after: bytes | bytearray,
        skip: str | None,
        at: float,
        mark: int = 0,
    ) -> None:
        self.data = data
        self.seed = seed
        self.mark = mark
        self.depth = depth
        self.found = found
        self.cached = cached
        self.cached_after = cached_after
        self.skip = skip
        self.at = at


def continuation(walk: Walk, found: int) -> bytes | bytearray:
    """The cached tokens (as bytes) at the place where a lookup ended; empty where nothing goes on."""
    neighbour = walk[4]
    if neighbour is None or not found:
        return b""
    start = (found - neighbour.start) * TOKEN_BYTES
    return neighbour.key[start : start + CONTEXT_TOKENS * TOKEN_BYTES]


class Explainer:
    """Composes the reports of one cache."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def complete(self, pending: PendingReport) -> MissReport:
        """The report of a lease."""
        num_tokens = len(pending.data) // TOKEN_BYTES
        if pending.skip is not None:
            return MissReport("skipped", num_tokens, 0, skipped=pending.skip)
        return self._classify(pending, num_tokens, None)

    def dry(self, data: bytes, space: Space | None, walk: Walk | None, admin: bool) -> MissReport:
        """The report that a lease would get now; `admin`: other namespaces count, too."""
        cache = self._cache
        num_tokens = len(data) // TOKEN_BYTES
        if not cache.enabled:
            return MissReport("skipped", num_tokens, 0, skipped=CACHE_IS_OFF)
        depth, found, seed, mark = 0, 0, 0, 0
        after: bytes | bytearray = b""
        if walk is not None:
            depth, found = walk.depth, walk.depth + walk.partial
            after = continuation(walk, found)
        if space is not None:
            seed, mark = cache._seed_and_mark(data, space, depth)
        cached = min(found if cache.partial_reuse else depth, num_tokens - 1)
        pending = PendingReport(data, seed, depth, found, cached, after, None, cache._clock(), mark)
        elsewhere = self._found_elsewhere(data, space) if admin else None
        return self._classify(pending, num_tokens, elsewhere)

    def _found_elsewhere(self, data: bytes, space: Space | None) -> int:
        """The longest match of another namespace. O(namespaces * tokens)."""
        others = [other for other in self._cache._tree.roots if other is not space]
        return max((self._cache._match(data, other).num_tokens for other in others), default=0)

    def _classify(self, pending: PendingReport, num_tokens: int, elsewhere: int | None) -> MissReport:
        cached, found, data = pending.cached, pending.found, pending.data
        if cached >= num_tokens - 1:
            return MissReport("hit", num_tokens, cached)
        if found > cached:
            return MissReport("partial_block", num_tokens, cached)
        record = self._cache._ghosts.find(data, pending.seed, pending.depth, found, pending.mark)
        if record is not None and record.at <= pending.at:
            reason: Any = record.reason
            age = pending.at - record.at
            return MissReport(reason, num_tokens, cached, age_s=age, evicted_by=record.by)
        if elsewhere is not None and elsewhere > found:
            return MissReport("namespace", num_tokens, cached)
        if pending.cached_after:
            after = data[found * TOKEN_BYTES : (found + CONTEXT_TOKENS) * TOKEN_BYTES]
            return MissReport("diverged", num_tokens, cached, found, pending.cached_after, after)
        return MissReport("first_seen", num_tokens, cached)
