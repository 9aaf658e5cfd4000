"""StepGraphs: steps recorded once and replayed with one launch each."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from openinfer.graph.errors import UnknownStep
from openinfer.tensor import Device, Stream, check, driver

NODE_PRIORITIES = 8
"""CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY: kernels keep the priority of the stream that they were captured on."""


def bucket_for(buckets: Sequence[int], size: int) -> int:
    """The smallest of the ascending `buckets` that holds `size`. Raises UnknownStep if none does."""
    at = bisect_left(buckets, size)
    if at == len(buckets):
        raise UnknownStep(f"{size} is above the largest bucket, {buckets[-1] if buckets else 'none'}")
    return buckets[at]


class StepGraphs:
    """Steps by key. With `capture` on a cuda device, `record` captures what `enqueue` puts on the stream into a CUDA
    graph, and `launch` replays it; otherwise `launch` calls `enqueue` again. Either way the same work is done.

    `enqueue` must do the same work at every launch: fixed addresses, and no allocation, wait or host decision. It
    may fork to other streams and join them again by events: a graph then has these branches.
    """

    def __init__(self, device: Device, stream: Stream, *, capture: bool) -> None:
        self._stream = stream
        self._capture = capture and device.kind == "cuda"
        self._steps: dict[Hashable, Any] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    def keys(self) -> list[Hashable]:
        """The keys in the order in which they were first recorded."""
        return list(self._steps)

    def record(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Record a step. A key recorded before is replaced."""
        self._steps[key] = self._captured(enqueue) if self._capture else enqueue

    def launch(self, key: Hashable) -> None:
        """Put the recorded step on the stream. Raises UnknownStep."""
        step = self._steps.get(key)
        if step is None:
            raise UnknownStep(f"no step was recorded under {key}")
        if self._capture:
            check(driver().cuGraphLaunch(step, self._stream.handle), "cuGraphLaunch")
        else:
            step()

    def _captured(self, enqueue: Callable[[], None]) -> Any:
        cu = driver()
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(cu.cuStreamBeginCapture(self._stream.handle, mode), "cuStreamBeginCapture")
        try:
            enqueue()
        except BaseException:
            # Leave capture mode; the first error is the one to report.
            cu.cuStreamEndCapture(self._stream.handle)
            raise
        graph = check(cu.cuStreamEndCapture(self._stream.handle), "cuStreamEndCapture")
        executable = check(cu.cuGraphInstantiate(graph, NODE_PRIORITIES), "cuGraphInstantiate")
        check(cu.cuGraphDestroy(graph), "cuGraphDestroy")
        check(cu.cuGraphUpload(executable, self._stream.handle), "cuGraphUpload")
        return executable

    def close(self) -> None:
        """Destroy the graphs. The stream must be idle."""
        if self._capture:
            for step in self._steps.values():
                check(driver().cuGraphExecDestroy(step), "cuGraphExecDestroy")
        self._steps = {}
