"""`python -m partita.cli` is `partita`."""

from partita.cli import main

main()
