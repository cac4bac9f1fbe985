"""Patience: how long requests that find no block may wait for blocks that are being copied out."""

from __future__ import annotations

from radixkv.tiers.speed import Speed

# Of the time that steps take, requests wait for copies so much in sum, and so many seconds at once.
_SHARE = 0.01
_MAX_S = 0.1


class Patience:
    """What copies may cost: a hundredth of the time that steps take, saved up to a tenth of a second.

    A copy that would take longer, or does, is given up. A thread that copies gets what steps and others leave
    of the cores: how long it takes is not known.
    """

    def __init__(self) -> None:
        self._left_s = 0.0
        self._since: float | None = None  # when somebody began to wait for the copy under way
        self._block = Speed()  # seconds for a block that is copied

    def earn(self, step_s: float) -> None:
        """A step has taken so long."""
        self._left_s = min(self._left_s + _SHARE * step_s, _MAX_S)

    @property
    def deadline(self) -> float | None:
        """When it is over, a reading of the clock; None: nobody waits."""
        return None if self._since is None else self._since + self._left_s

    def lasts(self, num_blocks: int, started: float, now: float) -> bool:
        """Whether somebody who needs blocks waits for a copy of so many, which began then."""
        if self._since is None:
            if not self._left_s or self._block.seconds(num_blocks) - (now - started) > self._left_s:
                return False
            self._since = now
        return now < self._since + self._left_s

    def copied(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were copied in that time."""
        self._block.measured(num_blocks, seconds)

    def end(self, now: float) -> None:
        """The copy under way has ended, or was given up."""
        if self._since is not None:
            self._left_s = max(0.0, self._left_s - (now - self._since))
            self._since = None
