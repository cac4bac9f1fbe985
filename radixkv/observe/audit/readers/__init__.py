# SPDX-License-Identifier: Apache-2.0
"""Readers of logs: JSON lines, HAR, LiteLLM's payload; gzipped or not, streamed, with damage counted."""
