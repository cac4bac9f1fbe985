"""EngineClient: all that a caller on an event loop may ask of an engine, wherever the engine runs.

`AsyncEngine` implements it over an engine in this process, the tests' scripted engine without a model; the
server uses nothing else. One conformance test runs on every implementation.

Callers name who asks by `tenant` and `salt`; the engine makes the cache's key of them (see
`radixkv.cache_key`), and no caller builds a namespace.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from struct import unpack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from radixkv.cache.insight.advisor import BreakPoint
    from radixkv.cache.insight.events import BlockChanges
    from radixkv.cache.insight.explain import MissReport
    from radixkv.cache.keys import TokenIds
    from radixkv.cache.retention.quota import Quota
    from radixkv.config import EngineConfig
    from radixkv.engine.counters import EngineStats
    from radixkv.request import OutputDelta, PrefixPin, RequestOutput, SamplingParams
    from radixkv.text.text_decoder import TextDecoder


class TextTokenizer(Protocol):
    """What callers may ask of a tokenizer; any thread. For long texts use the client's own methods."""

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without a template."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None: there is none, or nobody can read it."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a tokenizer_config.json tells of it, as JSON data: class, special tokens, added tokens.

        `bos_token`, `eos_token`, `pad_token` and `unk_token` are always there, null where there is none.
        """
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def stream(self, skip_special_tokens: bool = True, *, kept: Collection[str] = ()) -> TextDecoder:
        """A decoder for one output; what it gives concatenates to what `decode` gives for all ids.

        Args:
            kept: spellings of special tokens that are not skipped.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def is_added_token(self, token_id: int) -> bool:
        """Whether a token is one of those added to the vocabulary, special or not: grammars take each as a
        symbol that no text in them matches.
        """
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pin as its owner sees it.

    Attributes:
        token_ids: what is pinned: of what was asked for, the leading tokens that were cached and fitted.
        num_pinned_tokens: how many that are.
        expires_in_s: seconds until it ends, unless a hit renews it; None: it stays until it is unpinned.
        id: names it among the pins of its tenant and salt.
        node: the id of the node that it ends at; see `CachedNode`.
    """

    tenant: str
    salt: str
    token_ids: tuple[int, ...]
    num_pinned_tokens: int
    expires_in_s: float | None
    id: str = ""
    node: int = -1


class CachedNode(NamedTuple):
    """A run of cached blocks without a branch inside.

    Attributes:
        id: unlike those of all other nodes at this time; stays while the node's first block is cached.
        parent: the node above; None: prompts begin with this one.
        tenant, salt: whose it is; None: it is public.
        level: nodes above it.
        start: tokens before it.
        num_tokens, num_blocks: its own.
        num_hits: requests that found it; a little fewer where the tree was not seen whole.
        num_leases: running requests that hold it as the last of theirs.
        is_held: requests or pins protect it, or something below it.
        is_pinned: a pin protects it.
        idle_s: seconds since its last use, about; None: unknown, or longer than is remembered.
        eviction_rank: 1: it is the next to be evicted among these nodes; None: it is no candidate.
        key: its leading tokens, as many as were asked for: four bytes each, little-endian.
    """

    id: int
    parent: int | None
    tenant: str | None
    salt: str | None
    level: int
    start: int
    num_tokens: int
    num_blocks: int
    num_hits: int
    num_leases: int
    is_held: bool
    is_pinned: bool
    idle_s: float | None
    eviction_rank: int | None
    key: bytes

    @property
    def token_ids(self) -> list[int]:
        """Its leading tokens. O(their number)."""
        return list(unpack(f"<{len(self.key) // 4}i", self.key))


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """Nodes of the cache, read between the engine's steps.

    Attributes:
        nodes: a node's parent before it.
        is_complete: nothing was left out for its size, and nothing was reset meanwhile.
        ranks_are_exact: the eviction policy takes the candidates strictly by their ranks.
    """

    nodes: list[CachedNode]
    is_complete: bool
    ranks_are_exact: bool


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What a tenant (or a part of one) may keep in the cache, and what it does, in blocks.

    Attributes:
        owner: the tenant, or with further parts as (tenant, salt, ...).
        floor: others can't push it under so many.
        ceiling: it can't have more; None: the pool.
        used_blocks: cached and held.
        protected_blocks: of the cached ones, those that requests or pins protect.
    """

    owner: tuple[str, ...]
    floor: int
    ceiling: int | None
    used_blocks: int
    protected_blocks: int


class CacheClient(Protocol):
    """The prefix cache of an engine. Every call runs between two steps, on the engine's own thread.

    Raises (all of them):
        InvalidRequestError: token ids that are none, or a value out of range.
        EngineStoppedError: the engine has been closed or has failed.
    """

    async def match(self, token_ids: TokenIds, *, tenant: str = "", salt: str = "") -> int:
        """Leading tokens that are cached; changes nothing."""
        ...

    async def explain(
        self, token_ids: TokenIds, *, tenant: str = "", salt: str = "", admin: bool = False
    ) -> MissReport:
        """Why the prompt would miss if it came now; `admin`: look into other tenants' spaces, too."""
        ...

    async def pin(
        self,
        token_ids: TokenIds,
        *,
        tenant: str = "",
        salt: str = "",
        ttl: float | None = None,
        at_least: bool = False,
    ) -> int:
        """Keep what is cached of a prefix, for `ttl` seconds after each use; the tokens that are pinned.

        Args:
            at_least: make no pin shorter than it was, and at most one pin of what is pinned.
        """
        ...

    async def unpin(self, token_ids: TokenIds, *, tenant: str = "", salt: str = "") -> bool:
        """End a pin; False: there was none."""
        ...

    async def unpin_id(self, pin_id: str, *, tenant: str = "", salt: str = "") -> bool:
        """End the pin of that id; False: there is none."""
        ...

    async def pins(self, *, tenant: str | None = None, most_tokens: int | None = None) -> list[PinnedPrefix]:
        """The pins of a tenant; None: of all. `most_tokens`: of each, show only so many leading ones."""
        ...

    async def quotas(self) -> list[TenantQuota]:
        """The quotas, and how much of each is used."""
        ...

    async def publish(self, token_ids: TokenIds) -> int:
        """Share a prefix among all tenants; the tokens that are shared."""
        ...

    async def unpublish(self, token_ids: TokenIds) -> bool:
        """End that; False: it was not shared."""
        ...

    async def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas of all tenants; those not named are unbounded. Nothing changes if it raises.

        Raises:
            ConfigError: the floors together exceed the pool, or a tenant that has blocks gets its first one.
        """
        ...

    async def reset(self) -> None:
        """Forget everything that is cached; running requests keep what they use."""
        ...

    async def advice(self, limit: int = 10, *, tenant: str | None = None, salt: str = "") -> list[BreakPoint]:
        """Where prompts break off from cached ones: those of a tenant and salt; None: of all."""
        ...

    async def continuation(
        self, token_ids: TokenIds, *, tenant: str = "", salt: str = "", limit: int = 64
    ) -> list[int]:
        """With what the tenant's nearest cached prompt goes on where this one's match ends."""
        ...

    async def path(self, token_ids: TokenIds, *, tenant: str = "", salt: str = "") -> list[int]:
        """The ids of the nodes that hold what is cached of a prompt, from the top down."""
        ...

    async def nodes(
        self,
        *,
        tenant: str | None = None,
        salt: str = "",
        shown_tokens: int = 0,
        most_nodes: int = 20_000,
        most_tokens: int = 1_000_000,
    ) -> TreeSnapshot:
        """The nodes of the cache as data, upper ones first, read in slices of about a millisecond.

        Args:
            tenant: with `salt`, whose nodes, besides the public ones; None: everybody's.
            shown_tokens: leading tokens of each node to tell; -1: all.
            most_nodes, most_tokens: nodes seen and tokens told after which the rest is left out.
        """
        ...

    async def tree(self, max_lines: int = 50) -> str:
        """The tree as ASCII, at most `max_lines` lines."""
        ...

    def events(self, *, replay: bool = True) -> AsyncGenerator[BlockChanges]:
        """Which whole blocks are stored and removed from now on, in order, first (`replay`) what is there.

        Closing the iterator ends the subscription.

        Raises:
            EngineOverloadedError: the reader fell so far behind that events were dropped; subscribe again.
        """
        ...


class EngineClient(Protocol):
    """An engine as its callers on an event loop see it. Several event loops may use one client."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model_name(self) -> str: ...

    @property
    def model_fingerprint(self) -> str:
        """Identifies configuration, weights and dtype; empty: unknown."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        ...

    @property
    def context_length(self) -> int:
        """What the model, or the settings, allow; more than `max_model_len` where the pool is smaller."""
        ...

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Arguments of SamplingParams for requests that don't give them."""
        ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the queue was full after the last step, so that a request would be refused. O(1)."""
        ...

    @property
    def cache(self) -> CacheClient: ...

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Token ids of a text of any length, without holding up the event loop.

        Args:
            add_special_tokens: let the tokenizer add what it puts around a text.
            allow_special: spellings of control tokens in the text mean these tokens; False: they are text.

        Raises:
            InvalidRequestError: the text can't be tokenised.
        """
        ...

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation through the chat template, without holding up the event loop.

        Raises:
            InvalidRequestError: the template refuses the messages, or there is none.
        """
        ...

    async def check_quota(self, prompts: Sequence[TokenIds], *, tenant: str = "", salt: str = "") -> None:
        """Raise what `stream` would raise for a prompt that its tenant's ceiling never lets run.

        For several prompts of which none may begin where one is refused.

        Raises:
            ContextLengthExceededError: one of them leaves no room for a single token.
        """
        ...

    def stream(
        self,
        prompt: str | TokenIds,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        tenant: str = "",
        salt: str = "",
        cache_key_hint: str = "",
        priority: int = 0,
        pins: Sequence[PrefixPin] = (),
    ) -> AsyncGenerator[OutputDelta]:
        """Yield what each step adds, all samples interleaved. Closing the iterator aborts the request.

        Args:
            request_id: None: one that no other engine gives.
            cache_key_hint: what requests of a tenant and salt share that come back together, for eviction.
            pins: what of the prompt to pin once it is computed; `PromptOutcome` tells how much that was.

        A request that has ended, or whose iterator was closed, leaves its id free for another.

        Raises:
            InvalidRequestError, ContextLengthExceededError, EngineOverloadedError: before the first delta.
            RequestFailedError: the request failed; others go on.
            EngineStoppedError: the engine has been closed or has failed.
        """
        ...

    async def generate(
        self,
        prompt: str | TokenIds,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        tenant: str = "",
        salt: str = "",
        cache_key_hint: str = "",
        priority: int = 0,
        pins: Sequence[PrefixPin] = (),
    ) -> RequestOutput:
        """Wait for the whole output. Cancelling the task aborts the request. Raises what `stream` raises."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request with finish reason `abort`; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats:
        """The engine's counters as of its last step, or the last thing asked of it while it was idle."""
        ...

    async def close(self) -> None:
        """Stop; unfinished requests get EngineStoppedError. May be called again."""
        ...
