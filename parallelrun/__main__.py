"""`python -m parallelrun` (and `torchrun -m parallelrun`): the same program as the console script."""

import sys

from parallelrun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
