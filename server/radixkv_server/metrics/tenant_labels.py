"""TenantLabels: tenants as label values, up to a limit, since each one adds lines to every later scrape."""

from __future__ import annotations

MAX_TENANTS = 100
OTHERS = "others"


class TenantLabels:
    """The label `tenant`, where there is more than one.

    Args:
        enabled: whether metrics have the label at all.

    Attributes:
        names: the label's name, or nothing.
    """

    def __init__(self, enabled: bool) -> None:
        self.names: tuple[str, ...] = ("tenant",) if enabled else ()
        self._seen: set[str] = set()

    def values(self, tenant: str) -> tuple[str, ...]:
        """The label's value for a tenant: its name, or `others` once 100 have been seen. O(1)."""
        if not self.names:
            return ()
        if tenant == OTHERS:
            return (OTHERS,)
        if tenant not in self._seen:
            if len(self._seen) >= MAX_TENANTS:
                return (OTHERS,)
            self._seen.add(tenant)
        return (tenant,)

    def own(self, tenant: str) -> str | None:
        """The label's value that this tenant alone has; None: it has none of its own. O(1)."""
        return tenant if tenant in self._seen else None
