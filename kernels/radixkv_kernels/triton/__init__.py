# SPDX-License-Identifier: Apache-2.0
"""The GPU backend of the attention interface, its kernels, tiles and ahead-of-time compilation."""
