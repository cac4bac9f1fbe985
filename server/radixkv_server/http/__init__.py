# SPDX-License-Identifier: Apache-2.0
"""HTTP itself: the listener, limits, keys, bodies, errors, streaming, observation. Knows no API."""
