# SPDX-License-Identifier: Apache-2.0
"""Everything compiled for a CPU (numba): attention over paged K/V, and products with packed weights."""
