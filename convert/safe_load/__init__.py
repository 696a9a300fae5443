"""Read checkpoints without executing code in them. This package does not depend on any model."""

from luna_mega.convert.safe_load.reader import Checkpoint, read_checkpoint, read_tensors

__all__ = ["Checkpoint", "read_checkpoint", "read_tensors"]
