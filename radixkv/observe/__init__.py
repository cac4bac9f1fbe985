# SPDX-License-Identifier: Apache-2.0
"""Causes of diverging prompts, and the contents of the cache, seen from outside."""
