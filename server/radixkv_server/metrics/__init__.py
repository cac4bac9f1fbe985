# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics and traces: of requests at their end, of the engine at each scrape."""
