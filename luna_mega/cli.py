# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The entry point of the command line under the name of the package."""

from luna_mega_cli import main

__all__ = ["main"]
