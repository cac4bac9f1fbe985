# SPDX-License-Identifier: Apache-2.0
"""Weights in the forms in which checkpoints store them: codes, their scales, and what they stand for."""
