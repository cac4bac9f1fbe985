# SPDX-License-Identifier: Apache-2.0
"""Stored forms of weights crossed with small pools, ranks, adapters, tiers and narrow K/V.

    python tests/model/fuzz_stored_forms.py --seconds 600

Ends with an error at the first seed with a wrong answer. The same in small is a test
(`test_stored_crossings.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

os.environ["RADIXKV_CHECK_STEPS"] = "1"

import torch
from stored_crossings import cross, write_base


def main() -> None:
    """Cross seeds until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed, until = options.seed, time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name:
        base = write_base(Path(name, "base"))
        while seed == options.seed or time.monotonic() < until:
            with tempfile.TemporaryDirectory() as place:
                print(cross(seed, base, Path(place)), flush=True)
            seed += 1
    print(f"{seed - options.seed} crossings, no difference")


if __name__ == "__main__":
    main()
