# SPDX-License-Identifier: Apache-2.0
"""The metrics under vLLM's names, so that its dashboards show this server.

Names and meanings follow vLLM's `/metrics`; each sample has the labels `model_name` and `engine`. The labels
`hit` and `tenant`, which its dashboards do not know, are summed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.samples import Sample

_SOURCE = "radixkv_"

#: Ours, without prefix and suffix -> vLLM's, without `vllm:`.
_NAMES: dict[str, tuple[str, ...]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc",),
    "engine_queried_tokens": ("prefix_cache_queries",),
    "engine_hit_tokens": ("prefix_cache_hits",),
    "prompt_tokens": ("prompt_tokens",),
    "cached_prompt_tokens": ("prompt_tokens_cached",),
    "generated_tokens": ("generation_tokens",),
    "finished_samples": ("request_success",),
    "preemptions": ("num_preemptions",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "request_duration_seconds": ("e2e_request_latency_seconds",),
    "queue_seconds": ("request_queue_time_seconds",),
    "prefill_seconds": ("request_prefill_time_seconds",),
    "decode_seconds": ("request_decode_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "sample_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "spec_decode_drafts": ("spec_decode_num_drafts",),
    "spec_decode_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_accepted_tokens_per_position": ("spec_decode_num_accepted_tokens_per_pos",),
}
_LABELS = {"reason": "finished_reason", "le": "le", "position": "position"}


def under_vllm_names(metrics: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Return the metrics that vLLM has, too, under its names.

    Args:
        model_name: value of their label `model_name`.
    """
    for metric in metrics:
        if metric.name.startswith(_SOURCE):
            for name in _NAMES.get(metric.name.removeprefix(_SOURCE), ()):
                yield _renamed(metric, f"vllm:{name}", model_name)


def _renamed(metric: Metric, name: str, model_name: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue
        labels = {_LABELS[key]: value for key, value in sample.labels.items() if key in _LABELS}
        key = (sample.name.removeprefix(metric.name), tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    for (suffix, pairs), value in sums.items():
        more = {"model_name": model_name, "engine": "0"}
        renamed.samples.append(Sample(name + suffix, {**dict(pairs), **more}, value))
    return renamed
