# SPDX-License-Identifier: Apache-2.0
"""Layers rewritten for a GPU (fused, experts, states, stored weights); the rest works without this folder."""
