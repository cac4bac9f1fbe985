# SPDX-License-Identifier: Apache-2.0
"""Matrix products with packed float32 or int8 weights, and what stands between them in a layer."""
