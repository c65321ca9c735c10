"""`python -m leanmoe` is the `lean` command."""

from leanmoe.cli.main import main

main()
