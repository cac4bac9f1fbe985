# SPDX-License-Identifier: Apache-2.0
"""Audit of requests to a prefix cache, recorded or live: a record of each, and rules that judge it."""
