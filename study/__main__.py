"""``python -m study``, in a clone of the repository."""

from steadymoe.bench import cli
from study import command

cli.main(command.main)
