"""Device memory, streams, events, tensors, safetensors and GGUF loading, without PyTorch."""

from openinfer.tensor import dtypes
from openinfer.tensor.activity import Activity, ActivityRecorder
from openinfer.tensor.arena import Arena
from openinfer.tensor.checkpoint import Checkpoint
from openinfer.tensor.clocks import ClockReading, DeviceClock
from openinfer.tensor.cuda import DriverCounts, check, driver
from openinfer.tensor.device import Device
from openinfer.tensor.dtypes import (
    bfloat16,
    bool_,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from openinfer.tensor.dummy import DummyCheckpoint
from openinfer.tensor.errors import (
    ActivityNotAvailable,
    CheckpointError,
    ClosedError,
    CudaError,
    DeviceError,
    DriverNotFound,
    DTypeError,
    IndexRangeError,
    MissingExtra,
    OutOfMemory,
    ShapeError,
    TensorError,
)
from openinfer.tensor.gguf import GgufCheckpoint, GgufEntry, GgufFile, GgufTensor
from openinfer.tensor.headers import TensorInfo
from openinfer.tensor.loading import LoadReport, TensorLoad, load_tensors
from openinfer.tensor.memory import PinnedBuffer, memory_fence
from openinfer.tensor.nccl import NcclRanks
from openinfer.tensor.peers import PeerMemory, PeerSegment
from openinfer.tensor.places import Conversion, Places
from openinfer.tensor.progress import ProgressBar, format_bytes
from openinfer.tensor.shared import SharedCheckpoint, SharedWeights
from openinfer.tensor.stream import Event, Stream
from openinfer.tensor.tensor import Tensor, nbytes_of

__all__ = [
    "Activity", "ActivityNotAvailable", "ActivityRecorder", "Arena", "Checkpoint", "CheckpointError",
    "ClockReading", "ClosedError", "Conversion", "CudaError", "DTypeError", "Device", "DeviceClock",
    "DeviceError", "DriverCounts", "DriverNotFound", "DummyCheckpoint", "Event", "GgufCheckpoint",
    "GgufEntry", "GgufFile", "GgufTensor", "IndexRangeError", "LoadReport", "MissingExtra", "NcclRanks",
    "OutOfMemory", "PeerMemory", "PeerSegment", "PinnedBuffer", "Places", "ProgressBar", "ShapeError",
    "SharedCheckpoint", "SharedWeights", "Stream", "Tensor", "TensorError", "TensorInfo", "TensorLoad",
    "bfloat16", "bool_", "check", "driver", "dtypes", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "float16", "float32", "float64", "format_bytes", "int8", "int16", "int32", "int64", "load_tensors",
    "memory_fence", "nbytes_of", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip
