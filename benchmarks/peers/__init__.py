# SPDX-License-Identifier: Apache-2.0
"""Other engines that `benchmarks.compare` sets up and measures; one module each."""
