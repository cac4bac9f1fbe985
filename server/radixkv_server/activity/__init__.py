# SPDX-License-Identifier: Apache-2.0
"""The server's memory of its cache for people who watch it."""
