# SPDX-License-Identifier: Apache-2.0
"""The prefix cache over HTTP: what is in it, why prompts miss, pins, public prefixes, events."""
