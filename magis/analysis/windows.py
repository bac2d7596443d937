"""How a value lies on its storage."""

from __future__ import annotations

from magis.ir import Storage, Value


def fills(value: Value, storage: Storage) -> bool:
    """Whether the window is the whole storage, each byte once and as it is stored."""
    return not value.bits and value.offset == 0 and value.nbytes == storage.nbytes and is_dense(value)


def is_dense(value: Value) -> bool:
    """Whether the elements lie side by side without overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride, value.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor of that shape whose last dimension is innermost."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)
