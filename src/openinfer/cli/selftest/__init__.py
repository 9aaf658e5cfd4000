"""`openinfer selftest`: on any GPU, tests, accuracy gates and benchmarks in order of worth, within a budget.

Each stage is a process of its own. Its result is kept in DIR/selftest.json at once, so a run that was cut off goes on
where it stopped. From installed wheels `device`, `ops` and `packed` run, and with --model `model_gates` and
`model_serve`. The other stages need a checkout, its tests and scripts, and torch for the references.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from openinfer.cli.bench import idle, points
from openinfer.cli.bench.record import commit
from openinfer.cli.selftest import gate
from openinfer.cli.selftest.http_check import check_server
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.flag_parser import FlagParser
from openinfer.recipes.engine import Recipe
from openinfer.recipes.engine.startup import Built, build
from openinfer.recipes.engine.verdict import Check, Reference, load_reference

Result = dict[str, Any]


def device(work: Path) -> Result:
    """The machine: its GPU, driver and Python."""
    from openinfer.tensor import Device, check, driver

    gpu = Device("cuda", 0)
    gpu.activate()
    return {
        "ok": True,
        "gpu": gpu.name,
        "arch": gpu.arch,
        "num_sms": gpu.num_sms,
        "memory_bytes": gpu.total_memory,
        "cuda_driver": int(check(driver().cuDriverGetVersion(), "cuDriverGetVersion")),
        "python": platform.python_version(),
    }


def ops(work: Path) -> Result:
    """Every op of the installed libraries against its reference, at published shapes."""
    from openinfer.cli.selftest.ops import check_all
    from openinfer.kernels.measure.tuner import DeviceMeter

    found = list(check_all(DeviceMeter()))
    wrong = [one for one in found if one.problem]
    for one in wrong:
        print(f"FAIL {one.op}: {one.case}: {one.problem}", flush=True)
    names = {one.op for one in found}
    print(f"{len(found)} cases of {len(names)} ops, {len(wrong)} wrong", flush=True)
    return {"ok": bool(found) and not wrong, "cases": len(found), "ops": sorted(names),
            "wrong": [one._asdict() for one in wrong]}  # fmt: skip


def model_gates(model: Path) -> Result:
    """The accuracy gate of the checkpoint of --model against numpy's run of it, and the gate's negative controls."""
    from openinfer.cli import recipes

    recipe = recipes.find(model)
    if not isinstance(recipe, Recipe):
        return {"ok": False, "why": f"the recipe {recipe.name} has no engine of openinfer.recipes.engine"}
    references = gate.references(recipe, model)
    return _judged(build(recipe, model, tensor_parallel_size=_ranks()), references)


def model_serve(model: Path) -> Result:
    """The server on the checkpoint of --model."""
    with tempfile.TemporaryDirectory() as folder:
        return check_server(model, Path(folder) / "serve.log")


def _packed(work: Path) -> Result:
    """The accuracy gates of packed weights, an FP8 cache and adapters against numpy's runs, and their controls."""
    from openinfer.cli.selftest import packed

    verdicts, controls = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, found, wrong in packed.every(Path(folder)):
            print(name, *found, *wrong, sep="\n", flush=True)
            verdicts += [{"format": name, **check.as_dict()} for check in found]
            controls += [{"format": name, **check.as_dict()} for check in wrong]
    passed = all(one["passed"] for one in verdicts) and not any(one["passed"] for one in controls)
    return {"ok": passed, "verdicts": verdicts, "controls": controls}


def _pytest(*paths: str) -> Result:
    """Run the gpu-marked tests under these paths of the checkout, each in a process of its own."""
    lines, ok = {}, True
    for path in paths:
        files = [str(f) for f in sorted(Path(path).rglob("test_*.py")) if "mark.gpu" in f.read_text()]
        if not files:
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        tail = done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:]
        lines[path] = tail[0] if tail else f"exit code {done.returncode}"
        if done.returncode not in (0, 5):
            print(done.stdout[-6000:], done.stderr[-2000:])
            ok = False
    if not lines:
        return {"ok": False, "why": f"no tests under {', '.join(paths)}: run it at the root of a checkout"}
    return {"ok": ok, "suites": lines}


def _reference(recipe: str, name: str, work: Path, shape: str = "4b") -> Result:
    """A checkpoint with random weights in the folder `name`, and transformers' log-probabilities on it."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return {"ok": False, "why": "needs torch and transformers for the reference"}
    folder, shape = work / name, os.environ.get("OPENINFER_SELFTEST_SHAPE", shape)
    command = [sys.executable, "scripts/reference", recipe, "--shape", shape, "--out", str(folder)]
    done = subprocess.run(command, check=False)
    if done.returncode == 0:
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        command = [sys.executable, "scripts/bpe_tokenizer.py", str(folder), f"--vocab-size={vocab_size}"]
        done = subprocess.run(command, check=False)
    return {"ok": done.returncode == 0, "shape": shape}


def _gates(recipe: str, name: str, work: Path, **flags: Any) -> Result:
    return _judged(_build(recipe, work / name, **flags), load_reference(work / name / "reference.npz"))


def _judged(built: Built, references: Sequence[Reference]) -> Result:
    """The gate on every path of an engine, and its negative controls. The engine is closed afterwards."""
    verdicts, controls = _told(gate.run(built, references)), _told(gate.negative_controls(built, references))
    built.engine.close()
    return {
        "ok": all(v.passed for v in verdicts) and not any(v.passed for v in controls),
        "verdicts": [v.as_dict() for v in verdicts],
        "controls": [v.as_dict() for v in controls],
    }


def _told(checks: Iterable[Check]) -> list[Check]:
    found = []
    for check in checks:
        print(check, flush=True)
        found.append(check)
    return found


def _build(recipe: str, folder: Path, **flags: Any) -> Built:
    flags["tensor_parallel_size"] = _ranks()
    return build(idle.recipes_that_can()[recipe], folder, **flags)


def _ranks() -> int:
    return int(os.environ.get("OPENINFER_SELFTEST_RANKS", "1"))


def _bench(recipe: str, name: str, work: Path) -> Result:
    engine, _ = _build(recipe, work / name, enable_prefix_caching=False)
    figures = list(points.measure_points(engine, ["decode:1,1024", "prefill:1024"]))
    compiles = engine.stats().compiles_after_ready
    engine.close()
    return {"ok": compiles == 0, "compiles_after_ready": compiles, "points": figures}


def long(work: Path) -> Result:
    """The accuracy gate with pages of 64 tokens: every path again, and prompts up to the model's maximum."""
    folder = work / "model"
    script = [sys.executable, "scripts/reference", "qwen3", "--long", "--out", str(folder)]
    script += ["--shape", os.environ.get("OPENINFER_SELFTEST_SHAPE", "4b")]
    if subprocess.run(script, check=False).returncode:
        return {"ok": False, "why": "no reference for long prompts"}
    built = _build("qwen3", folder, block_size=64)
    verdicts = _told(gate.run(built, load_reference(folder / "reference.npz")))
    verdicts += _told(gate.run_long(built, load_reference(folder / "long.npz")))
    built.engine.close()
    return {"ok": all(v.passed for v in verdicts), "verdicts": [v.as_dict() for v in verdicts]}


QWEN3, HYBRID, DEEPSEEK = ("qwen3", "model"), ("qwen3_5", "hybrid"), ("deepseek_v4", "deepseek")
"""Recipes, and the folders of their checkpoints: the shapes of Qwen3-4B and Qwen3.5-4B, and five layers of V4-Flash's
with packed weights, whose gates run without and with activations that are rounded as in the published code."""
OTHER_TESTS = ("libs/tensor/tests", "libs/graph/tests", "recipes/tests", "tests")
STAGES: dict[str, tuple[Callable[[Path], Result], float]] = {
    "device": (device, 5),
    "ops": (ops, 60),
    "packed": (_packed, 60),
    "model_gates": (model_gates, 120),
    "model_serve": (model_serve, 60),
    "kernels": (lambda work: _pytest("libs/kernels/tests", "libs/sampler/tests"), 120),
    "reference": (partial(_reference, *QWEN3), 120),
    "gates": (partial(_gates, *QWEN3), 120),
    "bench": (partial(_bench, *QWEN3), 60),
    "serve": (lambda work: check_server(work / "model", work / "serve.log"), 60),
    "libraries": (lambda work: _pytest(*OTHER_TESTS), 350),
    "long": (long, 150),
    "hybrid_reference": (partial(_reference, *HYBRID), 150),
    "hybrid_gates": (partial(_gates, *HYBRID), 120),
    "hybrid_bench": (partial(_bench, *HYBRID), 60),
    "deepseek_reference": (partial(_reference, *DEEPSEEK, shape="flash"), 150),
    "deepseek_gates": (partial(_gates, *DEEPSEEK, activation_quantization="off"), 120),
    "deepseek_rounded": (partial(_gates, *DEEPSEEK, activation_quantization="on"), 120),
    "deepseek_bench": (partial(_bench, *DEEPSEEK), 90),
}
"""Name: the stage, and about how many seconds it takes. In order of worth."""
OF_MODEL = ("model_gates", "model_serve")
"""Stages that get the folder of --model."""
INSTALLED = ("device", "ops", "packed", *OF_MODEL)
"""Stages that need no checkout of the project."""


def main(argv: list[str]) -> int:
    parser = FlagParser("openinfer selftest", usage="openinfer selftest [flags]", description=__doc__)
    parser.add_argument("--budget", type=float, default=600, metavar="SECONDS", help="time to take at most")
    add = partial(parser.add_argument, metavar="DIR", type=Path)
    add("--out", default=Path("selftest"), help="folder of the results; default: ./selftest")
    add("--work", help="folder of the checkpoints (8 GB each); default: the results' folder")
    add("--model", help="a checkpoint for the accuracy gate and the server")
    parser.add_argument("--ranks", type=int, default=_ranks(), help="GPUs that share a model; default: 1")
    only = f"run only these stages: {', '.join(STAGES)}"
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=only)
    parser.add_argument("--fresh", action="store_true", help="forget earlier results in the folder")
    parser.add_argument("--json", action="store_true", help="print the results as JSON at the end")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only and not args.model and set(args.only) & set(OF_MODEL):
        parser.error(f"{', '.join(OF_MODEL)} need --model DIR")
    os.environ["OPENINFER_SELFTEST_RANKS"] = str(args.ranks)
    work = args.work or args.out
    try:
        work.mkdir(parents=True, exist_ok=True)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out and --work are folders that can be made: {error}")
    if args.stage:
        result = _result(args.stage, args.model if args.stage in OF_MODEL else work)
        (work / f"{args.stage}.json").write_text(json.dumps(result))
        return 0
    return _run(args, work)


def _result(name: str, work: Path) -> Result:
    """The result of a stage. A user's error, such as a missing driver, becomes a reason of one line."""
    try:
        return STAGES[name][0](work)
    except Exception as error:
        if not is_users_error(error):
            raise
        return {"ok": False, "why": one_line(error)}


def _run(args: argparse.Namespace, work: Path) -> int:
    path = args.out / "selftest.json"
    kept = path.exists() and not args.fresh
    state: dict[str, Any] = json.loads(path.read_text()) if kept else {"stages": {}}
    state |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit()}
    state["command"] = "openinfer selftest " + " ".join(sys.argv[2:])
    end, short = time.monotonic() + args.budget, list[str]()
    for name in _chosen(args):
        if state["stages"].get(name, {}).get("ok"):
            continue
        estimate = STAGES[name][1]
        left = end - time.monotonic()
        if left < estimate:
            short.append(name)
            continue
        result = _stage(name, work, args.model, left)
        state["stages"][name] = result
        path.write_text(json.dumps(state, indent=1))
        why = f": {result['why']}" if "why" in result else ""
        print(f"{name}: {'ok' if result['ok'] else 'FAILED'} in {result['seconds']:.1f} s{why}", flush=True)
    ran = {n: s for n, s in state["stages"].items() if not args.only or n in args.only}
    failed = [f"FAILED {name}: {one.get('why', 'see above')}" for name, one in ran.items() if not one["ok"]]
    ends = [f"not run within --budget {args.budget:g}: {', '.join(short)}"] if short else []
    ends += failed if short or len(ran) > 1 else []  # which nothing was said after else
    ends += [json.dumps(state)] if args.json else []
    print("\n".join(ends), end="\n" * bool(ends))
    return 0 if ran and not failed else 1


def _chosen(args: argparse.Namespace) -> list[str]:
    if args.only:
        return [name for name in STAGES if name in args.only]
    checkout = Path("scripts/reference").is_dir()
    chosen = [n for n in STAGES if (checkout or n in INSTALLED) and (args.model or n not in OF_MODEL)]
    if not args.model:
        print(f"not run without --model: {', '.join(OF_MODEL)}", flush=True)
    if not checkout:
        left = ", ".join(name for name in STAGES if name not in INSTALLED)
        print(f"not run outside a checkout of the project: {left}", flush=True)
    return chosen


def _stage(name: str, work: Path, model: Path | None, limit: float) -> Result:
    start = time.monotonic()
    result_file = work / f"{name}.json"
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "openinfer.cli", "selftest", "--stage", name, "--work", str(work)]
    command += ["--model", str(model)] if model else []
    try:
        failure = f"exit code {subprocess.run(command, timeout=limit, check=False).returncode}"
    except subprocess.TimeoutExpired:
        failure = f"not done within {limit:.0f} s"
    result = json.loads(result_file.read_text()) if result_file.exists() else {"ok": False, "why": failure}
    return {**result, "seconds": round(time.monotonic() - start, 2)}
