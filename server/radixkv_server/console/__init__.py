# SPDX-License-Identifier: Apache-2.0
"""The console: a page at `/` with the contents of the prefix cache and the reasons for misses."""
