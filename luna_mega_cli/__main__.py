"""Entry point of `python -m luna_mega_cli`, the same as `luna-mega`."""

import sys

from luna_mega_cli import main

if __name__ == "__main__":
    sys.exit(main())
