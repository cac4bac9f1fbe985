# SPDX-License-Identifier: Apache-2.0
"""Serving workloads over HTTP: `radixkv bench`, and helpers of the scripts in benchmarks/."""
