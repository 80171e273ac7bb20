"""`python -m opencon` is the command `opencon`."""

from opencon.cli import main

main()
