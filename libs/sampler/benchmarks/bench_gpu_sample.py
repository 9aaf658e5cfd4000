"""The cost of the sample segment on a GPU: python benchmarks/bench_gpu_sample.py [--vocabulary V] [--json FILE].

Each figure is one op, or the segment of all three, replayed as a CUDA graph: microseconds a replay, median of 20 timed
runs of 20 replays. Logits are drawn once: up to 64 rows they stay in the L2 cache, as a step's would. They are `normal`
with a standard deviation of 2.5; the same with 40 `peaks` a row between 10 and 22, as a trained model has; or `flat`,
with a standard deviation of 0.1.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib

import numpy as np

from openinfer.kernels import CudaDriver, LaunchPack, NullPack, Store, Target
from openinfer.sampler import SamplingParams
from openinfer.sampler.gpu import advance, sample, top_logprobs
from openinfer.sampler.gpu.ops.adjustments import adjustment_fields, adjustment_values
from openinfer.tensor import Device, Event, Stream, Tensor, check, driver

LOGITS = {"normal": (2.5, 0), "peaks": (2.5, 40), "flat": (0.1, 0)}
"""The standard deviation of the logits, and the number of peaks a row."""

SETTINGS = {
    "greedy": {"temperatures": 0},
    "temperature 0.7": {"temperatures": 0.7},
    "min_p 0.05": {"temperatures": 0.7, "min_ps": 0.05},
    "top_k 20": {"temperatures": 0.7, "top_ks": 20},
    "top_k 20, top_p 0.95": {"temperatures": 0.7, "top_ks": 20, "top_ps": 0.95},
    "top_k 1000": {"temperatures": 0.7, "top_ks": 1000},
    "top_p 0.95": {"temperatures": 0.7, "top_ps": 0.95},
    "top_p 0.95, temperature 1": {"temperatures": 1, "top_ps": 0.95},
    "greedy, 5 logprobs": {"temperatures": 0, "num_logprobs": 5},
    "greedy, penalties": {
        "temperatures": 0,
        "adjust": SamplingParams(repetition_penalty=1.1, presence_penalty=1),
    },
    "greedy, 300 biases": {
        "temperatures": 0,
        "adjust": SamplingParams(logit_bias=tuple((7 * i, 1.0) for i in range(300))),
    },
    "greedy, 128 bad words": {
        "temperatures": 0,
        "adjust": SamplingParams(bad_words_token_ids=tuple((i, i + 1, i + 2) for i in range(128))),
    },
    "top_k 20, penalties": {
        "temperatures": 0.7,
        "top_ks": 20,
        "adjust": SamplingParams(repetition_penalty=1.1, presence_penalty=1),
    },
}


def drawn(rows, vocabulary, std, peaks, device):
    """Logits on the device."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocabulary), np.float32) * np.float32(std)
    at = rng.integers(0, vocabulary, (rows, peaks))
    np.put_along_axis(logits, at, (10 + 12 * rng.random((rows, peaks))).astype(np.float32), axis=1)
    tensor = Tensor.empty(logits.shape, logits.dtype, device)
    tensor.copy_from(logits)
    return tensor


def arguments(logits, device, settings):
    """Tensors for all three ops by name; the device keeps them."""
    rng, (rows, vocabulary) = np.random.default_rng(0), logits.shape
    by_slot = {
        "temperatures": 1, "top_ks": 0, "top_ps": 1, "min_ps": 0, "min_lens": 0, "num_logprobs": 0, "alive": 1,
        "limits": 2**30, "last_tokens": 0, "seq_lens": 100,
    }  # fmt: skip
    arrays = {
        name: np.full(
            rows + 1, settings.get(name, value), np.float32 if name[-3:] in ("res", "_ps") else np.int32
        )
        for name, value in by_slot.items()
    }
    arrays |= {
        "seeds": rng.integers(-(2**31), 2**31, (rows + 1, 2)).astype(np.int32),
        "stop_ids": np.full((rows + 1, 16), -1, np.int32),
        "slots": np.arange(1, rows + 1, dtype=np.int32),
        "q_starts": np.arange(rows + 1, dtype=np.int32),
        "emits": np.ones(rows, np.int32),
        "tokens": np.zeros(rows, np.int32),
        "logprobs": np.zeros(rows, np.float32),
        "ids": np.zeros((rows, 20), np.int32),
        "values": np.zeros((rows, 20), np.float32),
        "result": np.zeros((rows, 3), np.int32),
    }
    for field in adjustment_fields(vocabulary):
        arrays[field.name] = np.zeros((rows + 1, *field.shape), field.dtype)
    if "adjust" in settings:
        values = adjustment_values(settings["adjust"], range(50), list(range(50)), vocabulary)
        for name, value in values.items():
            arrays[name][1:] = value
    tensors = {"logits": logits}
    for name, array in arrays.items():
        tensors[name] = Tensor.empty(array.shape, array.dtype, device)
        tensors[name].copy_from(array)
    return tensors


def commands(target, op, tensors):
    """The plan of one call of the op."""
    plan = NullPack(target)
    op(plan, **{field.name: tensors[field.name] for field in dataclasses.fields(op.type)})
    return plan


def submit(pack, plans, most=None):
    """Launch the plans, or the first `most` kernels of each."""
    for plan in plans:
        for call in plan.calls:
            pack.submit(call.op.name, call.commands[:most])


def captured(stream, launch):
    """`launch` as an instantiated graph."""
    cu = driver()
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(cu.cuStreamBeginCapture(stream.handle, mode), "cuStreamBeginCapture")
    launch()
    graph = check(cu.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")
    return check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")


def microseconds(stream, device, graph, replays=20, runs=20):
    cu, times = driver(), []
    for _ in range(runs):
        start, end = Event(device, timing=True), Event(device, timing=True)
        start.record(stream)
        for _ in range(replays):
            check(cu.cuGraphLaunch(graph, stream.handle), "cuGraphLaunch")
        end.record(stream)
        end.synchronize()
        times.append(end.elapsed_s(start) / replays * 1e6)
    return float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument(
        "--kernels", action="store_true", help="time the first 1, 2, 3 kernels of sample as well"
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    args = parser.parse_args()
    device = Device("cuda", 0)
    device.activate()
    target, stream = Target.of(device, cublas=False), Stream(device)
    cuda = CudaDriver(device, stream, Store(device.arch))
    print(f"{device.name}, vocabulary {args.vocabulary}: us")
    columns, results = ("sample", "top_logprobs", "advance", "segment"), []
    columns += tuple(f"{n} kernels" for n in (1, 2, 3)) if args.kernels else ()
    for (kind, (std, peaks)), rows in itertools.product(LOGITS.items(), args.rows):
        logits = drawn(rows, args.vocabulary, std, peaks, device)
        print(f"{kind}, {rows} rows".ljust(28), *(f"{name:>12}" for name in columns))
        for label, settings in SETTINGS.items():
            tensors = arguments(logits, device, settings)
            plans = [commands(target, op, tensors) for op in (sample, top_logprobs, advance)]
            size = max(plan.workspace_bytes(zeroed=False) for plan in plans)
            scratch = Tensor.empty((size,), np.dtype(np.uint8), device)
            pack = LaunchPack(target, cuda, scratch, None)
            figures = []
            timed_plans = [(chosen, None) for chosen in (*([plan] for plan in plans), plans)]
            timed_plans += [(plans[:1], most) for most in (1, 2, 3)] if args.kernels else []
            for chosen, most in timed_plans:
                launch = functools.partial(submit, pack, chosen, most)
                launch()  # loads the kernels
                stream.synchronize()
                figures.append(microseconds(stream, device, captured(stream, launch)))
            print(f"  {label:26}", *(f"{us:12.1f}" for us in figures), flush=True)
            timed = dict(zip(columns, figures, strict=True))
            results.append({"logits": kind, "rows": rows, "parameters": label, "us": timed})
    if args.json:
        about = {"device": device.name, "vocabulary": args.vocabulary}
        args.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
