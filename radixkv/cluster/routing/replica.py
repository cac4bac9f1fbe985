# SPDX-License-Identifier: Apache-2.0
"""Replica: a router's view of one replica: its blocks, its expected blocks, and its load.

resident     blocks by its events; exact
kept         blocks of a model with states after which it can go on, by its events, too
expected     blocks of prompts that were sent there and have no token yet, beyond the resident ones
charged      uncomputed tokens of these prompts, from the moment each was sent; without sight of
             the first token, until they should be computed, or their blocks are there
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixkv.cache.states.checkpoint import GRID
from radixkv.cluster.events.block_keys import block_key
from radixkv.cluster.routing.prompt_blocks import PromptBlocks

#: Prompt tokens a second, until some were measured.
DEFAULT_PREFILL_RATE = 2000.0
#: Time constant in seconds of the measured rate, counting only times with work.
RATE_WINDOW_S = 30.0
# A prompt of fewer tokens to compute says little of the rate: it takes as long as any step.
_MIN_MEASURED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PrefixOnReplica:
    """A replica's part of a prompt.

    Attributes:
        resident: leading tokens whose K/V is there, with states up to the last state that is kept.
        expected: tokens after these that it computes already, for another prompt.
    """

    resident: int
    expected: int = 0

    @property
    def tokens(self) -> int:
        """Leading tokens that this prompt need not compute."""
        return self.resident + self.expected


@dataclass(frozen=True, slots=True, eq=False)
class Charge:
    """A prompt that was sent to a replica and has no token yet.

    Attributes:
        tokens: that the replica has to compute.
        owner: whose the prompt is.
        links: of the blocks that the replica will have then, and did not have before.
        tells_first_token: it is said when that comes.
    """

    tokens: int
    owner: bytes
    links: tuple[bytes, ...]
    tells_first_token: bool = True


class Replica:
    """A replica. Only the methods of `Watcher`, which its follower calls, are thread-safe.

    Args:
        name: unique among replicas.
        block_size: tokens of its blocks.
        prefill_rate: prompt tokens a second, as far as that is known.
        keeps_prefixes: whether it never holds a block without all before it; then prompts are looked up in
            O(log blocks).

    Attributes:
        is_open: whether it takes requests; False: it is drained, or ill.
        num_running: requests that were sent there and have not ended.
    """

    def __init__(
        self,
        name: str,
        *,
        block_size: int = 16,
        prefill_rate: float = DEFAULT_PREFILL_RATE,
        keeps_prefixes: bool = True,
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.prefill_rate = prefill_rate
        self.keeps_prefixes = keeps_prefixes
        self.is_open = True
        self.num_running = 0
        self._resident: set[int] = set()
        self._kept: set[int] | None = None  # None: it has told of no state so far
        self._expected: dict[bytes, dict[bytes, Charge]] = {}  # owner -> link -> for whom it is computed
        self._charges: dict[Charge, None] = {}  # the oldest first
        self._charged_tokens = 0
        self._head_since = 0.0  # since when the oldest charge is being computed
        self._counted_until = 0.0  # the latest moment that the next two count
        self._busy_s = RATE_WINDOW_S / 4  # in which prompts were being computed; the first ones are a guess
        self._computed_tokens = self._busy_s * prefill_rate

    def __repr__(self) -> str:
        closed = "" if self.is_open else ", closed"
        return (
            f"Replica({self.name}: {len(self._resident)} blocks, {self._charged_tokens} tokens to compute "
            f"for {len(self._charges)} prompts, {self.num_running} running{closed})"
        )

    # ------------------------------------------------------------------ what its follower says

    def stored(self, keys: Sequence[int]) -> None:
        self._resident.update(keys)

    def removed(self, keys: Sequence[int]) -> None:
        self._resident.difference_update(keys)

    def kept(self, key: int) -> None:
        if self._kept is None:
            self._kept = set()
        self._kept.add(key)

    def dropped(self, key: int) -> None:
        if self._kept is not None:
            self._kept.discard(key)

    def cleared(self) -> None:
        self._resident = set()
        if self._kept is not None:
            self._kept = set()

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return len(self._resident)

    # ------------------------------------------------------------------ cached prefixes

    def find(self, prompt: PromptBlocks) -> PrefixOnReplica:
        """The cached part of a prompt; at least one token is left to compute.

        O(log blocks), with states O(blocks after the last state).
        """
        count, size, resident = prompt.count(self.block_size), self.block_size, self._resident

        def is_resident(index: int) -> bool:
            return any(key in resident for key in prompt.keys(size, index))

        if self.keeps_prefixes:
            held = _leading(is_resident, 0, count)
        else:
            held = next(
                (i for i, keys in enumerate(prompt.all_keys(size)) if resident.isdisjoint(keys)), count
            )
        most = prompt.num_tokens - 1
        if self._kept is not None:
            held = self._last_kept(prompt, min(held, most // size), self._kept)
        coming = self._expected.get(prompt.owner)
        if coming is None or held == count:
            return PrefixOnReplica(min(held * size, most))

        def is_coming(index: int) -> bool:
            return prompt.links(size, index, index + 1)[0] in coming

        expected = _leading(is_coming, held, count)
        return PrefixOnReplica(min(held * size, most), min(expected * size, most) - min(held * size, most))

    def _last_kept(self, prompt: PromptBlocks, count: int, kept: set[int]) -> int:
        """Return how many of a prompt's first blocks lie before the last state kept among them."""
        size = self.block_size
        step = max(1, GRID // size)
        for end in range(count - count % step, 0, -step):
            if any(key in kept for key in prompt.keys(size, end - 1)):
                return end
        return 0

    # ------------------------------------------------------------------ load

    def queue_s(self, now: float) -> float:
        """Seconds until it has computed all prompts that were sent there."""
        self._uncharge_silent(now)
        if not self._charges:
            return 0.0
        head = next(iter(self._charges)).tokens / self.prefill_rate
        done = min(head, max(0.0, now - self._head_since))
        return self._charged_tokens / self.prefill_rate - done

    def _uncharge_silent(self, now: float) -> None:
        """Uncharge prompts without a reported first token: their blocks are there, or their time is over."""
        silent = [charge for charge in self._charges if not charge.tells_first_token]
        for charge in silent:
            if charge.links and block_key(charge.owner, charge.links[-1]) in self._resident:
                self._uncharge(charge, now)
        while self._charges:
            head = next(iter(self._charges))
            ends = self._head_since + head.tokens / self.prefill_rate
            if head.tells_first_token or now < ends:
                return
            self._uncharge(head, ends)

    def charge(
        self, prompt: PromptBlocks, found: PrefixOnReplica, now: float, *, tells_first_token: bool = True
    ) -> Charge:
        """A prompt is sent there now. O(its blocks that are not there).

        Args:
            tells_first_token: `computed` is called when its first token comes.
        """
        if not self._charges:
            self._head_since = self._counted_until = now
        count = prompt.count(self.block_size)
        links = prompt.links(self.block_size, min(-(-found.tokens // self.block_size), count), count)
        charge = Charge(prompt.num_tokens - found.tokens, prompt.owner, links, tells_first_token)
        if links:
            self._expected.setdefault(prompt.owner, {}).update(dict.fromkeys(links, charge))
        self._charges[charge] = None
        self._charged_tokens += charge.tokens
        self.num_running += 1
        return charge

    def computed(self, charge: Charge, now: float) -> None:
        """A prompt's first token has come: it is computed, and its blocks are known from events.

        Several may be computed at once, so the rate is that of all, over the time in which there were any.
        """
        if charge not in self._charges:
            return
        if charge.tells_first_token and charge.tokens >= _MIN_MEASURED_TOKENS:
            took = max(0.0, now - self._counted_until)
            fades = math.exp(-took / RATE_WINDOW_S)
            self._busy_s = self._busy_s * fades + took
            self._computed_tokens = self._computed_tokens * fades + charge.tokens
            self.prefill_rate = self._computed_tokens / self._busy_s
        self._uncharge(charge, now)
        self._forget_links(charge)

    def ended(self, charge: Charge, now: float) -> None:
        """A request has ended, with or without tokens."""
        self.num_running -= 1
        if charge in self._charges:
            self._uncharge(charge, now)
        self._forget_links(charge)

    def _uncharge(self, charge: Charge, now: float) -> None:
        if charge is next(iter(self._charges)):
            self._head_since = now
        self._counted_until = now
        del self._charges[charge]
        self._charged_tokens -= charge.tokens

    def _forget_links(self, charge: Charge) -> None:
        """They are there, or will not come."""
        coming = self._expected.get(charge.owner)
        if coming is None:
            return
        for link in charge.links:
            if coming.get(link) is charge:
                del coming[link]
        if not coming:
            del self._expected[charge.owner]


def _leading(holds: Callable[[int], bool], start: int, count: int) -> int:
    """Count the held blocks among the first `count`; those before `start` are held, none without its parent.

    O(log count).
    """
    if start >= count or not holds(start):
        return start
    low, high = start + 1, count  # that many are held for sure; at most so many are
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low
