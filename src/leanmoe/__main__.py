"""`python -m leanmoe` is the `lean` command."""

from leanmoe.cli.entry import main

main()
