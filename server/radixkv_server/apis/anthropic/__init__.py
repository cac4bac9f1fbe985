# SPDX-License-Identifier: Apache-2.0
"""Anthropic's dialect: the Messages API."""
