# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a model on several processes, each with a share of its heads and columns."""
