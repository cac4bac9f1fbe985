# SPDX-License-Identifier: Apache-2.0
"""The prefix cache over HTTP: contents, reasons for misses, pins, public prefixes, events."""
