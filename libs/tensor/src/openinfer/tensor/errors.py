"""Every exception this library raises on purpose.

TensorError(Exception)
├── DeviceError(ValueError)        unknown device, two devices mixed, or no data there ("null")
├── ShapeError(ValueError)         shapes, strides or sizes that do not fit
├── DTypeError(TypeError)          unknown dtype, or two dtypes that differ
├── IndexRangeError(IndexError)    an index outside a tensor's axis
├── ClosedError(RuntimeError)      used after close()
├── OutOfMemory(MemoryError)       an arena or the device is full
├── CheckpointError(ValueError)    a damaged, hostile or unexpected checkpoint
├── DriverNotFound(OSError)        no libcuda, or no cuda-bindings to call it with
├── CudaError(RuntimeError)        the driver refused a call
├── ActivityNotAvailable(RuntimeError)   no CUPTI, or the driver does not let it work
└── MissingExtra(ImportError)      an optional dependency is needed; the message has the install command
"""

from pathlib import Path


class TensorError(Exception):
    """Root of this library's exceptions."""


class DeviceError(TensorError, ValueError):
    """The device named is unknown, is not the one needed, or has no such property."""

    user_can_mend = True


class ShapeError(TensorError, ValueError):
    """A shape, stride, size or alignment that does not fit."""


class DTypeError(TensorError, TypeError):
    """A dtype this library does not know, or two that had to be equal and are not."""


class IndexRangeError(TensorError, IndexError):
    """An integer index outside its axis."""


class ClosedError(TensorError, RuntimeError):
    """A stream, event, arena, buffer or checkpoint was used after `close()`."""


class OutOfMemory(TensorError, MemoryError):
    """An arena or a device has no room for what was asked."""

    user_can_mend = True


class CheckpointError(TensorError, ValueError):
    """A checkpoint is damaged or is not what was required. `tensor` is None when a whole file is at fault."""

    user_can_mend = True

    def __init__(self, file: Path, tensor: str | None, why: str) -> None:
        super().__init__(f"{file}: {why}" if tensor is None else f"{file}: tensor {tensor!r}: {why}")
        self.file = file
        self.tensor = tensor
        self.why = why


class DriverNotFound(TensorError, OSError):
    """The CUDA driver library, or the Python binding that calls it, is not installed."""

    user_can_mend = True


class CudaError(TensorError, RuntimeError):
    """A driver call failed: `call` names it, `code` is CUDA_ERROR_*, `text` the driver's own sentence."""

    def __init__(self, call: str, code: str, text: str) -> None:
        super().__init__(f"{call} failed with {code}: {text}")
        self.call = call
        self.code = code
        self.text = text


class ActivityNotAvailable(TensorError, RuntimeError):
    """Device activity cannot be recorded: CUPTI is not installed, or it refused."""


class MissingExtra(TensorError, ImportError):
    """A part of the library needs an optional dependency that is not installed."""

    user_can_mend = True
