"""``python -m numattn``: the command line."""

import sys

from numattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
