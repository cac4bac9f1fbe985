# SPDX-License-Identifier: Apache-2.0
"""Reports on misses: ghosts of evicted blocks, explanations, events."""
