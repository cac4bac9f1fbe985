# SPDX-License-Identifier: Apache-2.0
"""`python -m radixkv`: the command line."""

import os
import sys
from pathlib import Path

if not sys.flags.safe_path and sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
    # `python -m` looks there first: a json.py in the folder in which a server is started would be run.
    del sys.path[0]

from radixkv.cli.main import main

main()
