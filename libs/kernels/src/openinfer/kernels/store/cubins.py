"""Store: compiled kernels by key, from wheels, from a cache on disk, or compiled now; sealed while serving."""

import base64
import contextlib
import functools
import hashlib
import importlib.resources
import importlib.util
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from openinfer.kernels.errors import CompileError, KernelMissing
from openinfer.kernels.op.launch import CudaSpec, KernelSpec, Spec
from openinfer.kernels.store import check_owner, digest, make_private, write_whole

log = logging.getLogger("openinfer.kernels")

Progress = Callable[[int, int], None]

_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
"""The files that a file of CUDA C++ includes."""

_IMPORTED = re.compile(rb"^from (?!triton\b)([\w.]+)\.\w+ import", re.MULTILINE)
"""The packages that a kernel module imports from, but for the compiler's own."""

DAMAGE = (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of reading a cached kernel that is absent, cut short or not a kernel."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what a launch needs to know of it. `tensor_maps`: a dict a map with swizzle, elem_size, elem_type and
    block_size, as the compiler chose them."""

    cubin: bytes
    name: str
    shared: int
    num_warps: int
    num_ctas: int
    tensor_maps: tuple[dict[str, Any], ...]


class Prepared(NamedTuple):
    """The result of `Store.prepare`: the number of kernels asked for, and of those that it compiled."""

    kernels: int
    compiled: int


@functools.cache
def source_hash(module: str) -> str:
    """A hash of all source that a kernel module may call: every module of its package, and of the packages that these
    modules import from (by `from package.module import name`).

    Computable without Triton: the files are read, not imported. Raises KernelMissing where a package has no source.
    """
    digest = hashlib.sha256()
    packages = [module.rpartition(".")[0]]
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # no such parent, or an empty name
            spec = None
        folders = (spec.submodule_search_locations or []) if spec is not None else []
        files = sorted(path for folder in folders for path in Path(folder).glob("*.py"))
        if not files:
            raise KernelMissing(f"{module} is made of {package}, of which there is no source")
        for path in files:
            source = path.read_bytes()
            digest.update(path.name.encode() + b"\0" + source + b"\0")
            imported = sorted(name.decode() for name in set(_IMPORTED.findall(source)))
            packages += [name for name in imported if name not in packages]
    return digest.hexdigest()


def cuda_source(module: str, file: str) -> str:
    """The text of a file of CUDA C++ in a package, with the files of that package that it includes. Raises
    KernelMissing where a file is missing."""
    try:
        text = importlib.resources.files(module).joinpath(file).read_text()
    except (ImportError, OSError):
        raise KernelMissing(f"there is no {file} in the package {module}") from None
    return _INCLUDED.sub(lambda found: cuda_source(module, found[1]), text)


def spec_key(spec: Spec, arch: int) -> str:
    """The store's key: source, types, constants, options and architecture. Not the compiler's version: that names the
    folder."""
    if isinstance(spec, CudaSpec):
        source = hashlib.sha256(cuda_source(spec.module, spec.file).encode()).hexdigest()
    else:
        source = source_hash(spec.module)
    text = json.dumps([source, spec.as_json(), arch], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def triton_version() -> str | None:
    """The installed Triton's version, or None. Does not import it."""
    return _version("triton")


def nvrtc_version() -> str | None:
    """The installed NVRTC's version, or None. Does not load it."""
    return _version("nvidia-cuda-nvrtc")


def _version(distribution: str) -> str | None:
    import importlib.metadata  # a third of this library's import time

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


CUDA_FOLDER = "cuda"
TESTED_TRITON = "3.6.0"
"""The folder of kernels of CUDA C++, in place of a compiler's version: any NVRTC's cubins serve, because nothing but
the source fixes their parameters."""


def _numbers(version: str) -> list[int]:
    """The numbers of a version, for its order: 3.10 comes after 3.9."""
    return [int(n) for n in re.findall(r"\d+", version)]


def default_cache() -> Path:
    """$OPENINFER_CACHE, else $XDG_CACHE_HOME/openinfer, else ~/.cache/openinfer; kernels go into its `cubin` folder."""
    base = os.environ.get("OPENINFER_CACHE")
    if base is None:
        base = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openinfer")
    return Path(base) / "cubin"


def wheel_folders() -> list[Path]:
    """Folders of cubins that installed distributions ship: entry points of the group `openinfer.cubins` name packages
    that have one."""
    import importlib.metadata

    folders = []
    for entry in importlib.metadata.entry_points(group="openinfer.cubins"):
        found = importlib.util.find_spec(entry.value)
        folders += [Path(p) for p in (found.submodule_search_locations or [])] if found else []
    return folders


class Store:
    """Compiled kernels of one architecture.

    A kernel is looked for in `folders` (wheels), then in `cache`, each laid out as <triton version>/sm_<arch>/<key>:
    under the installed Triton's version, or under any if no Triton is installed. Kernels of CUDA C++ are in a folder
    `cuda` beside the versions. `prepare` compiles what is missing; after `seal` a miss raises KernelMissing and counts
    in `misses_after_seal`.

    The cache is made with mode 0700. One that other users can write to raises UntrustedCache (a PermissionError). A
    file that does not match its digest is compiled again.
    """

    def __init__(self, arch: int, cache: Path | None = None, folders: Sequence[Path] | None = None) -> None:
        self.arch = arch
        self.cache = default_cache() if cache is None else cache
        self._folders = [*(wheel_folders() if folders is None else folders), self.cache]
        self._kernels: dict[Spec, Compiled] = {}
        self._lock = threading.Lock()
        self.sealed = False
        self.misses_after_seal = 0

    def seal(self) -> None:
        """From now on a kernel that is not loaded is an error, never a compile."""
        self.sealed = True

    def get(self, spec: Spec) -> Compiled:
        """The compiled kernel; compiles it now if it is nowhere and the store is not sealed."""
        with self._lock:
            found = self._kernels.get(spec)
            if found is None:
                if self.sealed:
                    self.misses_after_seal += 1
                    raise KernelMissing(
                        f"{spec} was not prepared before the store was sealed: a step outside the plan"
                    )
                self._prepare([spec], None)
                found = self._kernels[spec]
            return found

    def prepare(self, specs: Iterable[Spec], progress: Progress | None = None) -> Prepared:
        """Load every kernel, compiling the missing ones in worker processes. `progress(done, total)` counts compiles.

        Raises CompileError with every failure, or KernelMissing where something must be compiled and its compiler is
        not installed.
        """
        with self._lock:
            return self._prepare(specs, progress)

    def can_prepare_cuda(self, specs: Iterable[Spec]) -> bool:
        """Whether `prepare` has or can compile the kernels of CUDA C++ among these. Logs how to get the others."""
        missing = [s for s in dict.fromkeys(specs) if isinstance(s, CudaSpec) and self._load(s) is None]
        if missing and nvrtc_version() is None:
            log.info(
                "%d kernels of CUDA C++ are in no wheel; without them steps of few tokens are slower: "
                "pip install 'openinfer-kernels[nvrtc]'",
                len(missing),
            )
            return False
        return True

    def _prepare(self, specs: Iterable[Spec], progress: Progress | None) -> Prepared:
        wanted = [s for s in dict.fromkeys(specs) if s not in self._kernels]
        check_owner(self.cache)
        loaded = {spec: self._load(spec) for spec in wanted}
        self._kernels |= {spec: kernel for spec, kernel in loaded.items() if kernel is not None}
        missing = [spec for spec, kernel in loaded.items() if kernel is None]
        for kind, version, packages in (
            (KernelSpec, triton_version(), f"'openinfer-kernels[jit]' 'triton=={TESTED_TRITON}'"),
            (CudaSpec, nvrtc_version(), "'openinfer-kernels[nvrtc]'"),
        ):
            absent = [spec for spec in missing if isinstance(spec, kind)]
            if absent and version is None:
                raise KernelMissing(
                    f"{len(absent)} kernels for sm_{self.arch} are not in the wheels or in {self.cache} (the first: "
                    f"{absent[0]}); install the compiler: pip install {packages}"
                )
        if missing:
            self._compile(missing, progress)
        return Prepared(len(wanted), len(missing))

    def _places(self, spec: Spec) -> Iterator[Path]:
        version = CUDA_FOLDER if isinstance(spec, CudaSpec) else triton_version()
        for folder in self._folders:
            found = (p.name for p in folder.glob("*") if p.is_dir())
            versions = [version] if version else sorted(found, key=_numbers, reverse=True)
            yield from (folder / v / f"sm_{self.arch}" for v in versions)

    def _load(self, spec: Spec) -> Compiled | None:
        key = spec_key(spec, self.arch)
        for place in self._places(spec):
            with contextlib.suppress(*DAMAGE):
                meta = json.loads((place / f"{key}.json").read_text())
                cubin = (place / f"{key}.cubin").read_bytes()
                if digest(meta, cubin) == meta["sha256"]:
                    return _compiled(meta, cubin)
        return None

    def _compile(self, specs: list[Spec], progress: Progress | None) -> None:
        make_private(self.cache)
        keys = {spec_key(s, self.arch): s for s in specs}
        errors: list[str] = []
        done = 0
        for answer in _run_workers(keys, self.arch):
            done += 1
            if progress is not None:
                progress(done, len(keys))
            spec = keys[answer["key"]]
            if "error" in answer:
                errors.append(f"{spec} for sm_{self.arch}: {answer['error']}")
                continue
            cubin = base64.b64decode(answer["cubin"])
            meta = {**answer["meta"], "spec": spec.as_json()}
            self._kernels[spec] = _compiled(meta, cubin)
            compiler = CUDA_FOLDER if isinstance(spec, CudaSpec) else str(triton_version())
            folder = self.cache / compiler / f"sm_{self.arch}"
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / f"{answer['key']}.cubin", cubin)
            # Last: the index entry makes the kernel exist.
            text = json.dumps({**meta, "sha256": digest(meta, cubin)})
            write_whole(folder / f"{answer['key']}.json", text.encode())
        if errors:
            raise CompileError("\n".join(errors))


def _compiled(meta: dict[str, Any], cubin: bytes) -> Compiled:
    maps = tuple(meta["tensor_maps"])
    return Compiled(cubin, meta["name"], meta["shared"], meta["num_warps"], meta["num_ctas"], maps)


def _run_workers(keys: dict[str, Spec], arch: int) -> Iterator[dict[str, Any]]:
    """Compile in worker processes; yields their answers as they come."""
    jobs = [json.dumps({"key": k, "spec": s.as_json(), "arch": arch}) for k, s in keys.items()]
    count = min(len(jobs), os.cpu_count() or 1, 16)
    env = {**os.environ, "TRITON_DISABLE_LINE_INFO": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "openinfer.kernels.store.compile_worker"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for _ in range(count)
    ]
    free: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def compiled(job: str) -> dict[str, Any]:
        worker, line = free.get(), ""
        try:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(job + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
        finally:
            free.put(worker)
        if not line:
            raise CompileError(f"a compile worker died with exit code {worker.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]

    threads = ThreadPoolExecutor(count)
    try:
        for worker in workers:
            free.put(worker)
        for answer in as_completed([threads.submit(compiled, job) for job in jobs]):
            yield answer.result()
    finally:
        for worker in workers:
            worker.kill()
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            with contextlib.suppress(BrokenPipeError):
                worker.communicate()
