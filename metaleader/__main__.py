"""`python -m metaleader` is the command line."""

from metaleader.cli import main

main()
