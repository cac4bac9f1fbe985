# SPDX-License-Identifier: Apache-2.0
"""`python -m radixkv`: the command line."""

from radixkv.cli.main import main

main()
