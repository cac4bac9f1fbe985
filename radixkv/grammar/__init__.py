# SPDX-License-Identifier: Apache-2.0
"""Answers that match a grammar: checked, compiled off the engine's thread, and applied as masks of tokens."""
