"""The objects and the C heap of a process that starts up and then serves."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Python's collector of cycles rests meanwhile, and passes over all that the start-up has left. Otherwise it would
    walk the weights of a mixture, of which there are tens of thousands, again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        trim()


def trim() -> None:
    """Give back what is free; 49 MB after a tokenizer of 152,000 entries was read. Does nothing without glibc."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
