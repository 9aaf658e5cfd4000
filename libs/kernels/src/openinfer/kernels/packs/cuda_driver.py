"""The cuda driver of the launching pack: cubins to functions, tensor maps, launches, cuBLASLt products."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from openinfer.kernels.errors import LaunchError
from openinfer.kernels.op.launch import TRITON_TYPES, Collective, CudaSpec, Matmul, PeerTable, Spec, TensorMap
from openinfer.kernels.op.packing import Parameters
from openinfer.kernels.packs.cublas import CublasLt
from openinfer.kernels.ranks.gpu_ranks import GpuRanks
from openinfer.kernels.store.cubins import Store
from openinfer.tensor import Device, Event, Stream, check, driver

STATIC_SHARED_LIMIT = 48 * 1024
"""Bytes of shared memory a block may have without opting in."""

MAP_TYPES = {"bf16": 9, "fp16": 6, "fp32": 7, "fp8e4nv": 0, "u8": 0, "i32": 3}
"""CUtensorMapDataType by Triton's element type."""

L2_PROMOTION_128B = 2
CAPTURE_ACTIVE = 1


class Loaded(NamedTuple):
    """A kernel in the device's memory. `shared`: bytes of dynamic shared memory a block."""

    function: Any
    threads: int
    shared: int
    tensor_maps: tuple[dict[str, Any], ...]
    call: str


class Branch(NamedTuple):
    """A stream of its own, and a mark for its end."""

    stream: Stream
    end: Event


@functools.cache
def encoder() -> Any:
    """cuTensorMapEncodeTiled by ctypes: the binding's does not align its result to the 64 bytes the driver demands."""
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4
    ]  # fmt: skip
    return function


class CudaDriver:
    """Launches on `stream` of `device`, with kernels from `store`.

    Use it from one thread, with the device activated. Without `cublas`, plan for a Target with cublas=False. `ranks`:
    needed for collectives.
    """

    PRIORITY: ClassVar[int] = -3
    """The priority that `stream` should have: a branch n beside it has this + n, up to 0. A device has at most six
    priorities, and a call two or three branches."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        store: Store,
        cublas: CublasLt | None = None,
        ranks: GpuRanks | None = None,
    ) -> None:
        self.store = store
        self._ranks = ranks
        self._device = device
        self._stream = stream
        self._cublas = cublas
        self._cu = driver()
        self._functions: dict[Spec, Loaded] = {}
        self._at = stream
        self._start: Event | None = None
        self._branches: dict[int, Branch] = {}
        self._forked = False
        self._begun: list[int] = []  # branches that have streams of their own
        self._begins = False  # the next launch is the first of one of them

    def load(self, spec: Spec) -> Loaded:
        """The kernel, loaded onto the device at first use. Load all before a capture: loading is not capturable."""
        found = self._functions.get(spec)
        if found is not None:
            return found
        cu, compiled = self._cu, self.store.get(spec)
        limit = self._device.shared_memory_per_block
        if compiled.shared > limit:
            raise LaunchError(
                f"{spec} needs {compiled.shared} bytes of shared memory a block; {self._device} has {limit}"
            )
        if compiled.num_ctas != 1:
            raise LaunchError(f"{spec} wants clusters of {compiled.num_ctas}; only 1 is launched")
        module = check(cu.cuModuleLoadData(compiled.cubin), "cuModuleLoadData")
        function = check(cu.cuModuleGetFunction(module, compiled.name.encode()), "cuModuleGetFunction")
        if compiled.shared > STATIC_SHARED_LIMIT:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, compiled.shared), "cuFuncSetAttribute")
        if isinstance(spec, CudaSpec):  # an SM with another division drains before it takes such a block
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            check(cu.cuFuncSetAttribute(function, attribute, 100), "cuFuncSetAttribute")
        # The block is what the compiler made of it, which may be more warps than were asked for.
        found = self._functions[spec] = Loaded(
            function, 32 * compiled.num_warps, compiled.shared, compiled.tensor_maps, f"cuLaunchKernel {spec}"
        )
        return found

    def encode_tensor_map(self, spec: Spec, tensor_map: TensorMap, address: int, index: int) -> bytes:
        meta = self.load(spec).tensor_maps[index]
        tensor = tensor_map.tensor
        shape, strides, count = tensor.shape, tensor.strides, len(tensor.shape)
        raw = ctypes.create_string_buffer(256)  # the driver wants the struct 64-byte aligned
        base = (ctypes.addressof(raw) + 127) & ~127
        size = (ctypes.c_uint64 * count)(*reversed(shape))
        pitch = (ctypes.c_uint64 * count)(*(n * tensor.dtype.itemsize for n in reversed(strides[:-1])))
        box = (ctypes.c_uint32 * count)(*reversed(meta["block_size"]))
        step = (ctypes.c_uint32 * count)(*[1] * count)
        status = encoder()(
            base, MAP_TYPES[TRITON_TYPES[tensor.dtype.name]], count, address,
            ctypes.addressof(size), ctypes.addressof(pitch), ctypes.addressof(box), ctypes.addressof(step),
            0, meta["swizzle"], L2_PROMOTION_128B, 0,
        )  # fmt: skip
        if status:
            raise LaunchError(
                f"cuTensorMapEncodeTiled gave {status} for {shape} with strides {strides}, {meta}"
            )
        return ctypes.string_at(base, 128)

    def launch(self, spec: Spec, grid: tuple[int, int, int], parameters: Parameters, early: bool) -> None:
        kernel = self.load(spec)
        begins, self._begins = self._begins, False
        if early and not begins:
            self._launch_early(kernel, grid, parameters)
            return
        status = self._cu.cuLaunchKernel(
            kernel.function, *grid, kernel.threads, 1, 1, kernel.shared, self._at.handle, parameters.params, 0
        )  # fmt: skip
        check(status, kernel.call)

    def _launch_early(self, kernel: Loaded, grid: tuple[int, int, int], parameters: Parameters) -> None:
        """Launch a kernel that may start before the one ahead in its stream has ended (see launch.Launch)."""
        cu = self._cu
        early = cu.CUlaunchAttribute()
        early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes, config.hStream = kernel.shared, self._at.handle
        config.attrs, config.numAttrs = [early], 1
        check(cu.cuLaunchKernelEx(config, kernel.function, parameters.params, 0), kernel.call)

    def matmul(self, command: Matmul, operands: Sequence[int], workspace: int) -> None:
        if self._cublas is None:
            raise LaunchError(
                "this plan has a cuBLASLt product and no cuBLASLt was loaded: plan with cublas=False"
            )
        self._cublas.matmul(command, operands, workspace, self._at.handle)

    def collective(self, command: Collective, out: int, x: int) -> None:
        """By NCCL. Raises LaunchError without ranks, or with another number of them."""
        self._of(command.ranks).run(command, out, x, self._at)

    def peers(self, table: PeerTable) -> int:
        """The address of the table of the ranks' segments."""
        return self._of(None).table(table)

    def _of(self, ranks: int | None) -> GpuRanks:
        if self._ranks is None or ranks not in (None, self._ranks.size):
            there = self._ranks.size if self._ranks is not None else "none"
            raise LaunchError(f"a collective is over {ranks or 'several'} ranks; this driver has {there}")
        return self._ranks

    def branch(self, number: int) -> None:
        """Into branch `number`; 0: back, which waits for all branches since the last 0.

        While the stream is captured, a branch is a stream of its own, so that the graph has edges for what waits and
        no others. Otherwise all stays on the one stream: launched one by one, kernels are seldom waiting. Branch 1 is
        the stream itself, whose kernels then start early behind those ahead, and so does the first behind branches.
        """
        if number == 0:
            for stream, end in (self._branches[n] for n in self._begun):
                end.record(stream)
                self._stream.wait(end)
            self._begun, self._forked, self._at = [], False, self._stream
            return
        start = self._start = self._start or Event(self._device)
        if not self._forked:
            status = check(self._cu.cuStreamIsCapturing(self._stream.handle), "cuStreamIsCapturing")
            if int(status) != CAPTURE_ACTIVE:
                return
            start.record(self._stream)
            self._forked = True
        if number == 1:
            self._at = self._stream
            return
        branch = self._branches.get(number)
        if branch is None:
            stream = Stream(self._device, min(0, self.PRIORITY + number))
            branch = self._branches[number] = Branch(stream, Event(self._device))
        if number not in self._begun:
            branch.stream.wait(start)
            self._begun.append(number)
            self._begins = True
        self._at = branch.stream
