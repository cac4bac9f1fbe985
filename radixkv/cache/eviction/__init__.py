# SPDX-License-Identifier: Apache-2.0
"""Order of eviction: its index, and one small class for each policy."""
