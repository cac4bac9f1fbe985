# SPDX-License-Identifier: Apache-2.0
"""Memories below the pool: their protocol, and moving blocks to and from them."""
