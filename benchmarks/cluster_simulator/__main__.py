"""`python -m benchmarks.cluster_simulator cluster|fit`."""

from benchmarks.cluster_simulator.commands import main

main()
