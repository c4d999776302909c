"""`python -m coordinator.cli`: how `hisparse up` starts its children, with or without an installed `hisparse`."""

from coordinator.cli import main

main(prog_name="hisparse")
