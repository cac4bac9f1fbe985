# SPDX-License-Identifier: Apache-2.0
"""Why a prompt missed: ghosts of evicted blocks, explanations, events."""
