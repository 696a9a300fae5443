"""Entry point of `python -m luna_mega.convert CHECKPOINT ...`, the same as `luna-mega convert CHECKPOINT ...`."""

import sys

from luna_mega_cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
