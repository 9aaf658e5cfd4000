"""The gated delta rule as commands: the division of a step's rows among a GPU's programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from openinfer.kernels.authoring import (
    Arg,
    Command,
    Launch,
    Scratch,
    Target,
    aligned,
    beside,
    launch,
    power_of_two,
)
from openinfer.tensor import Tensor, float32, int32

CHUNK = 64
"""Tokens of a chunk: its triangular system has this size, and the state exists at multiples of it."""

TILED_ROWS, SCANNED_ROWS = 8, 2
"""Rows of many tokens that a step has programs for. In a step with more such rows, programs take several tiles, or
rows. A program without work is not free, and in a step of 256 rows nearly all have one token. A row's scan alone
fills a GPU."""

VERIFIED_COLUMNS = 32
"""Columns of a state that a warp has in rows with drafts. A program has one warp, so that no sum crosses warps."""

_DEVICE = "openinfer.recipes.qwen3_5.device."
_OF_ROWS = ("slots", "q_starts", "seq_lens", "alive")


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernels are compiled. `step_columns`, `columns`: the columns of a state's DV that a program of the step,
    or of the scan, has."""

    step_columns: int = 128
    step_warps: int = 4
    step_registers: int = 0
    inputs_warps: int = 8
    inputs_registers: int = 80
    prepare_warps: int = 4
    prepare_registers: int = 168
    columns: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    norm_warps: int = 8
    beside: bool = False  # whether decode rows and prompts are branches of the graph


def choose(target: Target, heads: int, rows: int) -> Tuning:
    """The tuning that was fastest on an H200.

    A few rows run in small parts, so that there are enough programs for the SMs. Decode rows run beside prompts only
    where they are many enough to take longer than a fork and a join of the graph.
    """
    if heads * rows <= 2 * target.num_sms:
        return Tuning(step_columns=32, step_warps=1)
    return Tuning(beside=heads * rows > 32 * target.num_sms)


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one call by the names that gated_delta_net gives them, and its sizes."""

    t: Mapping[str, Tensor]
    key_heads: int
    eps: float

    @property
    def sizes(self) -> dict[str, int]:
        _, heads, dk, dv = self.t["state"].shape
        return {"KEYS": self.key_heads, "DK": dk, "DV": dv, "GROUP": heads // self.key_heads}

    @property
    def taps(self) -> dict[str, int]:
        return {"TAPS": self.t["conv_weight"].shape[1]}

    def tensors(self, *names: str) -> dict[str, Arg]:
        return {name: self.t[name] for name in names}

    def strides(self, *names: str) -> dict[str, Arg]:
        """Elements from one token or block of a tensor to the next, as `<name>_stride`."""
        return {f"{name}_stride".replace("_state_", "_"): aligned(self.t[name].strides[0]) for name in names}


def launches(call: Call, max_q_len: int, tuning: Tuning) -> Iterator[Command]:
    """The launches of a call. Rows of one token go to one kernel. Other rows go in chunks through four kernels. A step
    may have both; many rows of one token are then a branch beside the four kernels.

    Where rows have drafts, rows of a few tokens go to kernels of their own, rows without drafts too: such a row may
    have accepted some in the step before."""
    tokens, rows = call.t["out"].shape[0], call.t["slots"].shape[0]
    if "recent" in call.t:
        short = call.t["recent"].shape[1] // 2
        if max_q_len > short:
            yield from _chunks(call, tuning, short)
        yield from _verify(call, tokens if max_q_len <= short else 0, short)
    elif max_q_len == 1:
        yield _step(call, tuning, tokens)
    elif rows == 1:  # a prompt: that it may have one token left is not worth a launch in every step
        yield from _chunks(call, tuning, 0)
    elif tuning.beside:
        yield from beside(_chunks(call, tuning, 1), [_step(call, tuning, 0)])
    else:
        yield from (*_chunks(call, tuning, 1), _step(call, tuning, 0))


def _step(call: Call, tuning: Tuning, tokens: int) -> Launch:
    """Rows of one token, and zeros for the tokens from the last row's end to `tokens`."""
    (_, heads, _, dv), rows = call.t["state"].shape, call.t["slots"].shape[0]
    columns = min(tuning.step_columns, dv)
    args = (
        call.tensors("out", "qkv", "z", "ba", "conv_weight", "decay", "dt_bias", "norm_weight", "conv_state")
        | call.tensors("state", *_OF_ROWS, "state_from", "state_to")
        | {
            "partial": Scratch((rows, heads, dv), float32),
            "arrived": Scratch((rows, heads), int32, zeroed=True),
        }
        | call.strides("qkv", "z", "ba", "conv_state", "state")
        | {"eps": call.eps, "tokens": tokens}
    )
    grid = (heads * (dv // columns), rows)
    constants = call.sizes | call.taps | {"BV": columns}
    return launch(
        _DEVICE + "delta_step",
        "delta_step",
        grid,
        args,
        constants,
        num_warps=tuning.step_warps,
        max_registers=tuning.step_registers,
    )


def _verify(call: Call, tokens: int, short: int) -> Iterator[Launch]:
    """Rows of at most `short` tokens, and zeros for the tokens from the last row's end to `tokens`."""
    (_, heads, dk, dv), rows = call.t["state"].shape, call.t["slots"].shape[0]
    ring, snapshots = call.t["recent"].shape[1], call.t["snapshot_ends"].shape[1]
    width, columns = call.t["qkv"].shape[1], min(VERIFIED_COLUMNS, dv)
    of_step = call.tensors(*_OF_ROWS, "state_from", "state_to", "snapshot_ends", "snapshot_blocks")
    of_step |= call.tensors("recent", "accepted", "num_drafts")
    shared: dict[str, Arg] = {
        "made": Scratch((rows, ring, width), float32),
        "snapshots": snapshots,
        "short": short,
    }
    constants = call.sizes | {"RING": ring, "SNAPSHOTS": power_of_two(snapshots)}
    yield launch(
        _DEVICE + "delta_verify",
        "delta_inputs_short",
        (2 * call.key_heads + heads + 1, rows),
        call.tensors("qkv", "ba", "conv_weight", "conv_state")
        | of_step
        | call.strides("qkv", "ba", "conv_state", "recent")
        | shared,
        constants | call.taps | {"WIDE": max(dk, dv), "GATES": power_of_two(2 * heads)},
    )
    yield launch(
        _DEVICE + "delta_verify",
        "delta_verify",
        (heads * (dv // columns), rows),
        call.tensors("out", "z", "ba", "decay", "dt_bias", "norm_weight", "state")
        | of_step
        | call.strides("z", "ba", "state", "recent")
        | shared
        | {
            "partial": Scratch((rows, heads, short, dv), float32),
            "arrived": Scratch((rows, heads), int32, zeroed=True),
            "eps": call.eps,
            "tokens": tokens,
        },
        constants | {"BV": columns},
        num_warps=1,
    )


_CHUNKS = _DEVICE + "delta_chunks"


def _chunks(call: Call, tuning: Tuning, short: int) -> Iterator[Launch]:
    """Rows of more than `short` tokens, and zeros for the tokens after the last row."""
    (_, heads, dk, dv), (tokens, _), rows = (
        call.t["state"].shape,
        call.t["out"].shape,
        call.t["slots"].shape[0],
    )
    dtype = call.t["out"].dtype
    q, k = (Scratch((tokens, call.key_heads, dk), dtype) for _ in range(2))
    v, o = (Scratch((tokens, heads, dv), dtype) for _ in range(2))
    solved, scores = (Scratch((tokens, heads, CHUNK), dtype) for _ in range(2))
    made: dict[str, Arg] = {"solved": solved, "scores": scores, "decays": Scratch((heads, tokens), float32)}
    common: dict[str, Arg] = {"rows": rows, "short": short}
    tiles, loop = tokens // CHUNK + 2 * min(rows, TILED_ROWS), rows > TILED_ROWS
    sizes = call.sizes | {"C": CHUNK}
    yield launch(
        _CHUNKS,
        "delta_inputs",
        (2 * call.key_heads + heads, tiles),
        {"q": q, "k": k, "v": v}
        | call.tensors("qkv", "conv_weight", "conv_state", *_OF_ROWS, "state_from")
        | call.strides("qkv", "conv_state")
        | common,
        sizes | call.taps | {"LOOP": loop},
        num_warps=tuning.inputs_warps,
        max_registers=128 if loop else tuning.inputs_registers,
    )
    yield launch(
        _CHUNKS,
        "delta_prepare",
        (heads, tiles, 2),
        made
        | {"q": q, "k": k}
        | call.tensors("ba", "decay", "dt_bias", *_OF_ROWS)
        | call.strides("ba")
        | {"tokens": tokens, **common},
        {name: sizes[name] for name in ("KEYS", "DK", "GROUP", "C")}
        | {"LEVELS": CHUNK.bit_length() - 1, "LOOP": loop},
        num_warps=tuning.prepare_warps,
        max_registers=0 if loop else tuning.prepare_registers,
    )
    yield _scan(call, tuning, {"out": o, "q": q, "k": k, "v": v, **made}, short)
    yield launch(
        _CHUNKS,
        "delta_norm",
        (heads, tiles),
        call.tensors("out")
        | {"o": o}
        | call.tensors("z", "norm_weight", "slots", "q_starts", "alive")
        | call.strides("z")
        | {"rows": rows, "tokens": tokens, "eps": call.eps, "short": short},
        {"HEADS": heads, "DV": dv, "C": CHUNK},
        num_warps=tuning.norm_warps,
    )


def _scan(call: Call, tuning: Tuning, made: dict[str, Arg], short: int) -> Launch:
    """The scan: the chunks of each row in order. `made`: the outputs of the launches before."""
    _, heads, _, dv = call.t["state"].shape
    rows, snapshots = call.t["snapshot_ends"].shape
    tokens = call.t["out"].shape[0]
    loop = rows > TILED_ROWS
    columns = min(2 * tuning.columns if loop else tuning.columns, dv)
    args = (
        made
        | call.tensors("qkv", "conv_state", "state", *_OF_ROWS, "state_from", "state_to")
        | call.tensors("snapshot_ends", "snapshot_blocks")
        | call.strides("qkv", "conv_state", "state")
        | {"snapshots": snapshots, "tokens": tokens, "rows": rows, "short": short}
    )
    constants = {
        "C": CHUNK,
        "BV": columns,
        "SNAPSHOTS": power_of_two(snapshots),
        "STAGES": tuning.scan_stages,
        "LOOP": loop,
    }
    grid, constants = (
        (dv // columns, heads, SCANNED_ROWS if loop else rows),
        call.sizes | call.taps | constants,
    )
    return launch(_CHUNKS, "delta_scan", grid, args, constants, num_warps=tuning.scan_warps)
