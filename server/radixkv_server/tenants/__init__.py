# SPDX-License-Identifier: Apache-2.0
"""Tenants: their API keys, limits, quotas and counts."""
