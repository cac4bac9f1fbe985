# SPDX-License-Identifier: Apache-2.0
"""Tenancy: quotas, public prefixes and pins, added to the prefix cache by `TenantCache`."""
