# SPDX-License-Identifier: Apache-2.0
"""Replaying request traces against the real prefix cache: hit rates, policies, fragmentation. No torch."""
