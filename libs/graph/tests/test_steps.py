from __future__ import annotations

import numpy as np
import pytest

from openinfer.graph import GraphError, StepGraphs, UnknownStep, bucket_for
from openinfer.tensor import Device, Stream, Tensor


def test_the_smallest_bucket_that_holds_it() -> None:
    assert [bucket_for((1, 2, 8), n) for n in (0, 1, 2, 3, 8)] == [1, 1, 2, 8, 8]
    with pytest.raises(UnknownStep, match="9 is above the largest bucket, 8"):
        bucket_for((1, 2, 8), 9)
    with pytest.raises(UnknownStep, match="none"):
        bucket_for((), 1)


def test_a_recorded_step_runs_at_every_launch_and_not_before() -> None:
    device = Device("cpu")
    stream = Stream(device)
    counter = np.zeros(1, np.int32)
    steps = StepGraphs(device, stream, capture=True)
    steps.record(("decode", 8), lambda: counter.__iadd__(1))
    assert counter[0] == 0
    steps.launch(("decode", 8))
    steps.launch(("decode", 8))
    assert counter[0] == 2
    assert ("decode", 8) in steps
    assert ("decode", 16) not in steps
    assert len(steps) == 1
    steps.record(("decode", 8), lambda: counter.__iadd__(10))
    steps.launch(("decode", 8))
    assert counter[0] == 12
    assert len(steps) == 1
    steps.close()
    with pytest.raises(UnknownStep, match=r"\('decode', 8\)"):
        steps.launch(("decode", 8))
    assert issubclass(UnknownStep, GraphError)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
def test_replay_does_what_the_calls_do(gpu: Device, capture: bool) -> None:
    with Stream(gpu) as stream:
        source, target = Tensor.empty((1024,), "int32", gpu), Tensor.empty((1024,), "int32", gpu)
        calls = 0

        def step() -> None:
            nonlocal calls
            calls += 1
            stream.copy_async(target.ptr, source.ptr, source.nbytes, "d2d")
            stream.memset_async(source.ptr, 255, 4)

        steps = StepGraphs(gpu, stream, capture=capture)
        steps.record("copy", step)
        for value in (3, 4, 5):
            source.copy_from(np.full(1024, value, np.int32), stream)
            steps.launch("copy")
            stream.synchronize()
            assert target.numpy().tolist() == [value] * 1024
            assert source.numpy()[:2].tolist() == [-1, value]
        assert calls == (1 if capture else 3)
        steps.close()


@pytest.mark.gpu
def test_a_failure_while_capturing_leaves_the_stream_usable(gpu: Device) -> None:
    with Stream(gpu) as stream:
        steps = StepGraphs(gpu, stream, capture=True)

        def broken() -> None:
            raise ValueError("no such bucket")

        with pytest.raises(ValueError, match="no such bucket"):
            steps.record("broken", broken)
        assert "broken" not in steps
        tensor = Tensor.empty((4,), "uint8", gpu)
        steps.record("fill", lambda: stream.memset_async(tensor.ptr, 9, 4))
        steps.launch("fill")
        stream.synchronize()
        assert tensor.numpy().tolist() == [9, 9, 9, 9]
        steps.close()
