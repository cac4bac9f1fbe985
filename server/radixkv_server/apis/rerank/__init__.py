# SPDX-License-Identifier: Apache-2.0
"""Reranking and scoring by a causal model: how likely it calls a document relevant to a query."""
