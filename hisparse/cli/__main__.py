"""`python -m hisparse.cli`: how `hisparse up` starts its children, with or without an installed `hisparse`."""

from hisparse.cli import main

main(prog_name="hisparse")
