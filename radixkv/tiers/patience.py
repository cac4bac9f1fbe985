"""Patience: how long requests that find no block may wait for blocks that are being copied out."""

from __future__ import annotations

# Of the time that steps take, requests wait for copies so much in sum, and so many seconds at once.
_SHARE = 0.01
_MAX_S = 0.1


class Patience:
    """What copies may cost: a hundredth of the time that steps take, saved up to a tenth of a second.

    Attributes:
        left_s: how long somebody may wait now.
    """

    def __init__(self) -> None:
        self.left_s = 0.0

    def earn(self, step_s: float) -> None:
        """A step has taken so long."""
        self.left_s = min(self.left_s + _SHARE * step_s, _MAX_S)

    def spend(self, seconds: float) -> None:
        """Somebody has waited."""
        self.left_s = max(0.0, self.left_s - seconds)
