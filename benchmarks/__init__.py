# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that anyone can run: `python -m benchmarks.NAME --help`; README.md lists them.

The scripts stand in folders by what they measure, and are run and imported by their name alone: each folder
is a part of this package's search path.
"""

from pathlib import Path

__path__ += [
    str(folder)
    for folder in sorted(Path(__file__).parent.iterdir())
    if folder.is_dir() and folder.name not in ("cluster_simulator", "data", "peers", "results", "__pycache__")
]
