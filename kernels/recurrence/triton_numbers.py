"""Real and complex numbers in Triton kernels: tuples of 1 or 2 tiles, so that kernels support both."""

import triton
import triton.language as tl


@triton.jit
def zeros(shape, COMPONENTS: tl.constexpr):
    if COMPONENTS == 1:
        return (tl.zeros(shape, tl.float32),)
    else:
        return tl.zeros(shape, tl.float32), tl.zeros(shape, tl.float32)


@triton.jit
def load(pointer, places, plane, mask, COMPONENTS: tl.constexpr):
    """Return float32 numbers, 0 if masked; the imaginary parts are `plane` after the real parts."""
    real = tl.load(pointer + places, mask, other=0.0).to(tl.float32)
    if COMPONENTS == 1:
        return (real,)
    else:
        return real, tl.load(pointer + plane + places, mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, places, plane, mask, number):
    tl.store(pointer + places, number[0], mask)
    if len(number) == 2:
        tl.store(pointer + plane + places, number[1], mask)


@triton.jit
def add(a, b):
    if len(a) == 1:
        return (a[0] + b[0],)
    else:
        return a[0] + b[0], a[1] + b[1]


@triton.jit
def times(a, b):
    if len(a) == 1:
        return (a[0] * b[0],)
    else:
        return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


@triton.jit
def real_times(a, b):
    """Return the real part of a product; `a` may be a real number."""
    if len(a) == 1:
        return a[0] * b[0]
    else:
        return a[0] * b[0] - a[1] * b[1]


@triton.jit
def add_scaled(number, weight, value):
    """Return number + weight value for real values; the weight may be real if the number is complex; None = 1."""
    if weight is None:
        return (number[0] + value,)
    elif len(number) == 1:
        return (number[0] + weight[0] * value,)
    elif len(weight) == 1:
        return number[0] + weight[0] * value, number[1]
    else:
        return number[0] + weight[0] * value, number[1] + weight[1] * value


@triton.jit
def select(condition, a, b):
    if len(a) == 1:
        return (tl.where(condition, a[0], b[0]),)
    else:
        return tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1])
