"""`openinfer bench NAME`: the benchmarks. Each is a module of its own, imported when it is asked for."""

import importlib
import sys

YARDSTICKS = {
    "serve": "a server's latencies and throughput, by an independent client",
    "step": "decode and prefill steps and offline throughput, through the engine and on the device",
    "ops": "every op at every shape that the engine runs, on the device",
    "kernels": "ops at the shapes that their modules name, with other launches beside them, on the device",
    "eval": "how many questions a model answers right, by exact checks",
    "host": "what the host does for a step and for a token; needs no GPU",
}


def main(argv: list[str]) -> int:
    """Run a benchmark; returns its exit code, 2 for wrong arguments."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name not in YARDSTICKS:
        print(f"openinfer bench: error: {name!r} is not one of {', '.join(YARDSTICKS)}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"openinfer.cli.bench.{name}").main(rest)
    return code


def _help() -> str:
    lines = [f"  {name:<7} {what}" for name, what in YARDSTICKS.items()]
    end = "  openinfer bench NAME --help   the flags of one"
    return "\n".join(["usage: openinfer bench NAME ...", "", *lines, "", end])
