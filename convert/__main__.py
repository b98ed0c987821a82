"""``python -m convert``."""

from convert.cli import main

main(prog_name="convert")
