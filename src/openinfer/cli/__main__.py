"""`python -m openinfer.cli`: the command `openinfer` without its script."""

import sys

from openinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
