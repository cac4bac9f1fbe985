# SPDX-License-Identifier: Apache-2.0
"""`radixkv bench` under the name of the other scripts: `python -m benchmarks.serving`."""

import sys

from radixkv.cli.main import main

if __name__ == "__main__":
    sys.argv = ["radixkv", "bench", *sys.argv[1:]]
    main()
