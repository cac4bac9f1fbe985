# SPDX-License-Identifier: Apache-2.0
"""TenantLabels: tenants as label values, up to a limit, since each adds lines to every later scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric

MAX_TENANTS = 100
OTHERS = "others"


class TenantLabels:
    """The label `tenant`, where there is more than one.

    Args:
        enabled: add the label to metrics.

    Attributes:
        names: the label's name, or nothing.
    """

    def __init__(self, enabled: bool) -> None:
        self.names: tuple[str, ...] = ("tenant",) if enabled else ()
        self._seen: set[str] = set()

    def values(self, tenant: str) -> tuple[str, ...]:
        """Return the label's value for a tenant: its name, or `others` after the first 100. O(1)."""
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
        """Return the label's value of this tenant alone; None: it has none of its own. O(1)."""
        return tenant if tenant in self._seen else None


#: Metrics that tell nothing about requests. Totals are not among them: a total minus one's own share tells
#: about the other tenants, and so do times and sizes of the process, of steps, blocks and queues.
_OF_NOBODY = ("radixkv", "radixkv_healthy")


def of_tenant(metrics: Iterable[Metric], tenant: str | None) -> Iterator[Metric]:
    """Return the samples with this `tenant`, and metrics that tell nothing about requests. O(samples).

    Args:
        tenant: result of `TenantLabels.own`; None: there are no samples of its own.
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
