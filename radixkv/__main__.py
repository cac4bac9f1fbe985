"""`python -m radixkv`: the command line."""

from radixkv.tools.cli import main

main()
