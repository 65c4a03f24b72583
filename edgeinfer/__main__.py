"""`python -m edgeinfer` is the command `edgeinfer`."""

from edgeinfer.cli import main

main(prog_name="edgeinfer")
