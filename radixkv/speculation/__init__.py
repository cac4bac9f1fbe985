# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding without a draft model: sources of draft tokens, and the number that pays."""
