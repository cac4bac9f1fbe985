"""Tenants as label values, up to a limit, since each one adds lines to every later scrape; what they see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric

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


#: What says nothing of anybody's requests. All that counts for everybody is left out: a total, less what is
#: one's own, is what the others did; so are times and sizes of the process, of steps, blocks and queues.
_OF_NOBODY = ("radixkv", "radixkv_healthy")


def of_tenant(metrics: Iterable[Metric], tenant: str | None) -> Iterator[Metric]:
    """The samples whose label `tenant` is this one, and those that say nothing of requests. O(samples).

    Args:
        tenant: a value of the label, as `TenantLabels.own` gives it; None: it has no samples of its own.
    """
    for metric in metrics:
        if metric.name in _OF_NOBODY:
            yield metric
            continue
        own = [sample for sample in metric.samples if tenant and sample.labels.get("tenant") == tenant]
        if own:
            seen = Metric(metric.name, metric.documentation, metric.type)
            seen.samples = own
            yield seen
