# SPDX-License-Identifier: Apache-2.0
"""Layers rewritten for a CPU (packed, fused, int8) and their threads; the rest works without this folder."""
