# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.cluster_simulator cluster|fit`."""

from benchmarks.cluster_simulator.commands import main

main()
