"""``python -m steadymoe.bench.speed``: see ``steadymoe speed --help``."""

import sys

from steadymoe.bench.speed.run import main

main(sys.argv[1:])
