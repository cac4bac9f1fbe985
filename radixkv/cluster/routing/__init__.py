# SPDX-License-Identifier: Apache-2.0
"""Routing: a request goes to the replica expected to answer soonest, by the blocks each really holds."""
