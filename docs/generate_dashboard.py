# SPDX-License-Identifier: Apache-2.0
"""Write the Grafana dashboard that `radixkv dashboards` gives out, from the panels below.

    python docs/generate_dashboard.py

A panel is a title, its meaning with the remedy, a unit, and queries of Prometheus with their legends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "server" / "radixkv_server" / "metrics" / "dashboards" / "radixkv.json"
WIDTH, HEIGHT = 8, 8  # of a panel, in a grid 24 wide
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

#: Appended to every name: the servers that the dashboard's variable selects.
WHERE = '{instance=~"$instance"}'


def rate(name: str, by: str = "") -> str:
    """A counter's rate, summed over the servers."""
    return f"sum{by and f' by ({by})'} (rate(radixkv_{name}{WHERE}[$__rate_interval]))"


def quantile(q: float, name: str, by: str = "") -> str:
    """A histogram's quantile over the servers."""
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({q}, sum by ({labels}) (rate(radixkv_{name}_bucket{WHERE}[$__rate_interval])))"
    )


def now(name: str, by: str = "") -> str:
    """A gauge, summed over the servers."""
    return f"sum{by and f' by ({by})'} (radixkv_{name}{WHERE})"


@dataclass(frozen=True)
class Panel:
    """A panel: queries as (expression, legend)."""

    title: str
    meaning: str
    unit: str
    queries: list[tuple[str, str]]
    stacked: bool = False


ROWS: dict[str, list[Panel]] = {
    "The cache": [
        Panel(
            "Prompt tokens: cached, computed",
            "How much of the prompts came from the cache. A falling share with steady traffic: look at the "
            "missed tokens by reason.",
            "short",
            [
                (rate("cached_prompt_tokens_total"), "cached /s"),
                (f"{rate('prompt_tokens_total')} - {rate('cached_prompt_tokens_total')}", "computed /s"),
            ],
            stacked=True,
        ),
        Panel(
            "Hit rate",
            "Cached over all prompt tokens.",
            "percentunit",
            [(f"{rate('cached_prompt_tokens_total')} / {rate('prompt_tokens_total')}", "hit rate")],
        ),
        Panel(
            "Missed tokens by reason",
            "first_seen: new text. diverged: the prompt leaves a cached one early; GET /v1/cache/advice says "
            "where. evicted: the pool is too small, or pins and floors are missing. load_too_slow, checksum: "
            "a tier has the blocks and does not bring them in time, or they are damaged.",
            "short",
            [(rate("missed_prompt_tokens_total", "reason"), "{{reason}} /s")],
            stacked=True,
        ),
        Panel(
            "KV blocks by state",
            "held: running requests and pins. cached: given up for new ones when needed. Nothing free and "
            "nothing cached: requests wait or are preempted.",
            "short",
            [(now("kv_blocks", "state"), "{{state}}"), (now("kv_blocks_pinned"), "pinned (of held)")],
            stacked=True,
        ),
        Panel(
            "Evicted blocks by age",
            "How long evicted blocks had not been used. Young ones would have been hit: more memory, or "
            "fewer different prompts.",
            "s",
            [
                (quantile(0.1, "evicted_block_age_seconds"), "p10"),
                (quantile(0.5, "evicted_block_age_seconds"), "p50"),
            ],
        ),
        Panel(
            "Contexts that outgrow the pool",
            "Long prompts wait for their turn rather than evict what is in use. If much is missed since it "
            "was evicted, a tier or another replica keeps it.",
            "short",
            [
                (now("prompts_waiting_for_turn"), "prompts waiting for their turn"),
                (now("reserved_tokens"), "tokens reserved, not computed"),
            ],
        ),
        Panel(
            "Evictions and preemptions",
            "Evictions are normal in a full pool; preemptions cost work: lower max_num_seqs or add memory.",
            "short",
            [
                (rate("evicted_blocks_total"), "evicted blocks /s"),
                (rate("preemptions_total"), "preemptions /s"),
            ],
        ),
    ],
    "Tiers": [
        Panel(
            "Prompt blocks from tiers",
            "What disk or Redis brought and got. Blocks that are saved and never loaded: the traffic repeats "
            "nothing, or the tier is smaller than what is used again.",
            "short",
            [
                (rate("tier_loaded_blocks_total", "tier"), "{{tier}} loaded /s"),
                (rate("tier_saved_blocks_total", "tier"), "{{tier}} saved /s"),
                (rate("tier_dropped_blocks_total", "tier"), "{{tier}} dropped /s"),
            ],
        ),
        Panel(
            "Lookups in tiers",
            "Lookups that found blocks in the tier, and that found none; a long prefix takes several.",
            "short",
            [
                (rate("tier_hits_total", "tier"), "{{tier}} hits /s"),
                (rate("tier_misses_total", "tier"), "{{tier}} misses /s"),
            ],
        ),
        Panel(
            "Tiers that are down, fail, or are refused",
            "up below the number of servers: a disk is full or Redis can't be reached, and prompts are "
            "computed; the log has the reason. refused: load_too_slow, slow; checksum, damaged.",
            "short",
            [
                (now("tier_up", "tier"), "{{tier}} up"),
                (rate("tier_errors_total", "tier, call"), "{{tier}} {{call}} failed /s"),
                (rate("tier_refused_total", "tier, reason"), "{{tier}} {{reason}} /s"),
            ],
        ),
    ],
    "Images": [
        Panel(
            "Images: decoded, encoded",
            "For models that see. Images inside cached prefixes are not encoded. Many more encoded than "
            "decoded: prompts part before their images; GET /v1/cache/advice says where.",
            "short",
            [
                (rate("images_decoded_total"), "decoded /s"),
                (rate("images_reused_total"), "pixels kept from an earlier turn /s"),
                (rate("images_encoded_total"), "encoded /s"),
            ],
        ),
        Panel(
            "Encoder cache",
            "Images to be computed whose encodings were there, or had to be made. Many evictions: more are "
            "in use at once than are kept.",
            "short",
            [
                (rate("encoder_cache_hits_total"), "hits /s"),
                (rate("encoder_cache_misses_total"), "misses /s"),
                (rate("encoder_cache_evictions_total"), "evictions /s"),
            ],
        ),
        Panel(
            "Time and memory of images",
            "Seconds a second in the tower and in decoders, and what they keep. A tower that is busy all the "
            "time holds up first tokens.",
            "short",
            [
                (rate("image_encode_seconds_total"), "encoding s/s"),
                (rate("image_decode_seconds_total"), "decoding s/s"),
                (f"{now('image_encodings_bytes')} / 2^30", "encodings GiB"),
                (f"{now('decoded_images_bytes')} / 2^30", "pixels GiB"),
            ],
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            "From arrival to the first token.",
            "s",
            [(quantile(q, "time_to_first_token_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)],
        ),
        Panel(
            "Time to first token by share cached (p50)",
            "What the cache saves: the distance between the lines.",
            "s",
            [(quantile(0.5, "time_to_first_token_seconds", "hit"), "{{hit}} cached")],
        ),
        Panel(
            "Inter-token latency",
            "Between two tokens of an answer. High p99: long prompts share steps with decodes; lower the "
            "token budget.",
            "s",
            [(quantile(q, "inter_token_latency_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)],
        ),
        Panel(
            "Where the time goes (p50)",
            "Wait for the first step, prompt, answer.",
            "s",
            [
                (quantile(0.5, "queue_seconds"), "queue"),
                (quantile(0.5, "prefill_seconds"), "prefill"),
                (quantile(0.5, "decode_seconds"), "decode"),
            ],
        ),
        Panel(
            "Requests",
            "Waiting for long: the server is full.",
            "short",
            [(now("requests_running"), "running"), (now("requests_waiting"), "waiting")],
        ),
        Panel(
            "Request duration",
            "From arrival to the end of the answer.",
            "s",
            [(quantile(q, "request_duration_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)],
        ),
    ],
    "Traffic": [
        Panel(
            "Generated tokens",
            "Throughput of answers.",
            "short",
            [(rate("generated_tokens_total"), "tokens /s")],
        ),
        Panel(
            "Lengths (p50)",
            "Tokens of prompts and of answers.",
            "short",
            [
                (quantile(0.5, "request_prompt_tokens"), "prompt"),
                (quantile(0.5, "sample_tokens"), "answer"),
            ],
        ),
        Panel(
            "How answers end",
            "abort: the client left. error: see the log.",
            "short",
            [(rate("finished_samples_total", "reason"), "{{reason}} /s")],
            stacked=True,
        ),
        Panel(
            "HTTP answers by status",
            "4xx: clients' mistakes and limits. 5xx: the server's.",
            "short",
            [(rate("http_requests_total", "status"), "{{status}} /s")],
            stacked=True,
        ),
        Panel(
            "Event loop lag (p99)",
            "How late timers fire; above 0.1 s something holds up every stream.",
            "s",
            [(quantile(0.99, "event_loop_lag_seconds"), "p99")],
        ),
        Panel(
            "Prompt tokens by tenant",
            "Only with API keys.",
            "short",
            [(rate("prompt_tokens_total", "tenant"), "{{tenant}} /s")],
            stacked=True,
        ),
    ],
}


def panel_json(panel: Panel, panel_id: int, x: int, y: int) -> dict[str, Any]:
    stacking = {"mode": "normal", "group": "A"} if panel.stacked else {"mode": "none", "group": "A"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never", "stacking": stacking}
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(panel.queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        y += 1
        for number, panel in enumerate(row):
            x, down = WIDTH * (number % 3), HEIGHT * (number // 3)
            panels.append(panel_json(panel, len(panels) + 1, x, y + down))
        y += HEIGHT * -(-len(row) // 3)
    instances = "label_values(radixkv_healthy, instance)"
    return {
        "uid": "radixkv",
        "title": "radixkv",
        "tags": ["radixkv", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "instance",
                    "type": "query",
                    "label": "Server",
                    "datasource": SOURCE,
                    "query": {"query": instances, "refId": "instances"},
                    "definition": instances,
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    print(f"wrote {TARGET}")
