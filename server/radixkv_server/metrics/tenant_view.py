"""What a user may see of the metrics: its own tenant's, and nothing from which another's prompts follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric

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
