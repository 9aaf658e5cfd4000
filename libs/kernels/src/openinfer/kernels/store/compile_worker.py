"""`python -m openinfer.kernels.store.compile_worker`: compiles kernels named on standard input, a JSON line each.

Triton compiles its functions, and NVRTC files of CUDA C++. It is a process of its own for two reasons. Triton decides
at import whether it compiles or interprets. A failed pass prints whole modules on the error stream. It needs no GPU.
In: {"key", "spec", "arch"}; out: {"key", "meta", "cubin"} with the cubin in base64, or {"key", "error"}.
"""

import base64
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from openinfer.kernels.op.launch import DTYPES
from openinfer.kernels.store.cubins import cuda_source


def compile_spec(spec: dict[str, Any], arch: int) -> tuple[bytes, dict[str, Any]]:
    """Compile one kernel; returns the cubin and the facts that a launch needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(importlib.import_module(spec["module"]), spec["function"])
    types, constants = dict(spec["signature"]), dict(spec["constants"])
    runtime = [n for n in function.arg_names if n not in constants]
    if runtime != list(types):
        raise TypeError(f"launch gives {list(types)}, the kernel takes {runtime}")
    if function.is_gluon():
        types = {n: _with_layout(kind) for n, kind in types.items()}
    signature = {n: "constexpr" if n in constants else types[n] for n in function.arg_names}
    attrs = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in spec["divisible"]}
    options = {"num_warps": spec["num_warps"], "num_stages": spec["num_stages"], "enable_fp_fusion": True}
    options["maxnreg"] = spec["max_registers"] or None
    source = GluonASTSource if function.is_gluon() else ASTSource
    made, target = source(function, signature, constants, attrs), GPUTarget("cuda", arch, 32)
    compiled = triton.compile(made, target=target, options=options)
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise TypeError("the kernel wants scratch memory of its own; pass tensor maps from the host instead")
    return compiled.asm["cubin"], {
        "name": meta.name,
        "shared": meta.shared,
        "num_warps": meta.num_warps,
        "num_ctas": meta.num_ctas,
        "tensor_maps": [dict(m) for m in (meta.tensordesc_meta or [])],
    }


def compile_cuda(spec: dict[str, Any], arch: int) -> tuple[bytes, dict[str, Any]]:
    """Compile one kernel of CUDA C++, for exactly this architecture; returns as compile_spec."""
    from cuda.bindings import nvrtc

    def check(answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {status.name}")
        return values[0] if values else None

    source = cuda_source(spec["module"], spec["file"]).encode()
    program = check(nvrtc.nvrtcCreateProgram(source, spec["file"].encode(), 0, None, None))
    options = [f"--gpu-architecture=sm_{arch}{'a' if arch >= 90 else ''}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in spec["constants"]]
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.rstrip(b"\0 ").decode())
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    meta = {"name": spec["function"], "shared": spec["shared"], "num_warps": -(-spec["threads"] // 32)}
    return cubin, {**meta, "num_ctas": 1, "tensor_maps": tensor_maps(spec["signature"])}


def tensor_maps(signature: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """The maps among the arguments of a kernel of CUDA C++. Only tiles with rows of 128 bytes are swizzled."""
    found = []
    for _, kind in signature:
        if kind.startswith("tensordesc<"):
            element, _, block = kind[len("tensordesc<") : -len("]>")].partition("[")
            sizes = [int(n) for n in block.split(",")]
            swizzled = sizes[-1] * DTYPES[element].itemsize == 128
            found.append({"swizzle": 3 if swizzled else 0, "block_size": sizes})
    return found


def _with_layout(kind: str) -> str:
    """A tensor map's type with the layout of its tile in shared memory, which Gluon needs; other types unchanged."""
    from triton.experimental.gluon import language as gl

    if not kind.startswith("tensordesc<"):
        return kind
    element, _, block = kind[len("tensordesc<") : -len("]>")].partition("[")
    dtype = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv, "fp32": gl.float32}[element]
    layout = gl.NVMMASharedLayout.get_default_for([int(n) for n in block.split(",")], dtype)
    return f"{kind[:-1]},{layout!r}>"


def main() -> None:
    reply = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for line in sys.stdin:
            job = json.loads(line)
            answer: dict[str, Any] = {"key": job["key"]}
            try:
                compile_job = compile_cuda if "file" in job["spec"] else compile_spec
                cubin, answer["meta"] = compile_job(job["spec"], job["arch"])
                answer["cubin"] = base64.b64encode(cubin).decode()
            except Exception as e:
                answer["error"] = f"{type(e).__name__}: {e}"[:2000]
            reply.write(json.dumps(answer) + "\n")
            reply.flush()


if __name__ == "__main__":
    main()
