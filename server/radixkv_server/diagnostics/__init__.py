# SPDX-License-Identifier: Apache-2.0
"""Comparison of requests with earlier ones, by fingerprints, to find the first break of a shared prefix."""
