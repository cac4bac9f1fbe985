# SPDX-License-Identifier: Apache-2.0
"""ImageCollector: the work on images as Prometheus metrics, for models that see."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixkv.engine.client import EngineClient
from radixkv.engine.counts import ImageCounts
from radixkv_server.chats.image_loader import ImageLoader


class ImageCollector(Collector):
    """Reads the counts of the engine's encoder and of the server's decoder at each scrape."""

    def __init__(self, engine: EngineClient, loader: ImageLoader) -> None:
        self._engine = engine
        self._loader = loader

    def collect(self) -> Iterator[Metric]:
        encoder, decoder = self._engine.stats().images or ImageCounts(), self._loader.counts
        for name, text, value in (
            ("images_encoded", "Images that the model's tower has run on.", float(encoder.encoded)),
            ("image_encode_seconds", "Time that this took.", encoder.encode_s),
            ("encoder_cache_hits", "Images to be computed whose encodings were there.", float(encoder.hits)),
            ("encoder_cache_misses", "Images to be computed that had to be encoded.", float(encoder.misses)),
            ("encoder_cache_evictions", "Encodings that made room for others.", float(encoder.evicted)),
            ("images_decoded", "Files of images that became pixels.", float(decoder.decoded)),
            ("images_reused", "Images whose pixels were there from an earlier turn.", float(decoder.reused)),
            ("image_decode_seconds", "Time of decoding, in its threads.", decoder.decode_s),
        ):
            yield CounterMetricFamily(f"radixkv_{name}", text, value=value)
        for name, text, size in (
            ("image_encodings_bytes", "Encoded images that are kept.", encoder.kept_bytes),
            ("decoded_images_bytes", "Decoded images that are kept for later turns.", decoder.kept_bytes),
        ):
            yield GaugeMetricFamily(f"radixkv_{name}", text, value=size)
