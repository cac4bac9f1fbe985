"""The workloads of `radixkv bench`, under the name of the other scripts: `python -m benchmarks.serving`."""

from radixkv.bench.workloads import (
    OUTPUT_TOKENS,
    WORKLOADS,
    Answer,
    Client,
    Result,
    medians,
    run_workload,
    run_workloads,
    served_model,
    show,
    words,
)

__all__ = [
    "OUTPUT_TOKENS",
    "WORKLOADS",
    "Answer",
    "Client",
    "Result",
    "medians",
    "run_workload",
    "run_workloads",
    "served_model",
    "show",
    "words",
]


if __name__ == "__main__":
    import sys

    from radixkv.cli import main

    sys.argv = ["radixkv", "bench", *sys.argv[1:]]
    main()
