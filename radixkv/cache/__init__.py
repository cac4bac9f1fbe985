# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: radix tree, block pool, eviction, retention and explanation. Imports no torch."""
