"""Public names of the kernels."""

from luna_mega.kernels._dispatch import use_backend
from luna_mega.kernels.luna_attention.op import explain, luna_attention, luna_pack, luna_unpack

__all__ = ["explain", "luna_attention", "luna_pack", "luna_unpack", "use_backend"]
