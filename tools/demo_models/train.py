"""Train a family's demo model: `python tools/demo_models/train.py FAMILY --out DIR --seconds 400`.

DIR/tokenizer.json must be there (make_tokenizer.py). Writes the checkpoint to DIR and prints how it did on the held-out
cases. `--seconds` counts from the start of this process to the end of training; the evaluation follows. On a GPU the
whole step, all lengths of rows and the optimizer, is one CUDA graph; small functions of it are compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

BEGAN = time.monotonic()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import checkpoint  # noqa: E402
import corpus  # noqa: E402
import layers  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.fx.experimental._config  # noqa: E402
from answers import evaluate, report  # noqa: E402
from families import FAMILIES  # noqa: E402
from model import Model, describe  # noqa: E402
from optimizer import Optimizer  # noqa: E402
from torch import Tensor  # noqa: E402

WARM_UP, SEED, SAMPLE = 0.02, 0, 2000
BATCH = {"qwen3": 256, "qwen3_5": 192, "deepseek_v4": 128}
"""Chats a step."""
FOLDER = Path(__file__).resolve().parents[2] / "demo"


def log(text: str) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f}] {text}", flush=True)


class Feed:
    """Batches on the device: of each length of rows as many as its share of the chats, as in `sample`."""

    def __init__(self, sample: dict[int, corpus.Rows], chats: int, device: torch.device) -> None:
        count = sum(len(part.ids) for part in sample.values())
        self._sizes = [max(1, round(chats * len(part.ids) / count)) for part in sample.values()]
        self._rng = np.random.default_rng(SEED)
        self.load(sample, device)
        self.batch = [
            tuple(torch.zeros_like(x[:1].long().expand(size, *x.shape[1:]).contiguous()) for x in part)
            for part, size in zip(self._parts, self._sizes, strict=True)
        ]
        self.tokens = sum(ids.numel() for ids, _, _ in self.batch)

    def load(self, rows: dict[int, corpus.Rows], device: torch.device) -> None:
        """The chats to draw from, each once before any comes again."""
        self._parts = [
            [torch.from_numpy(x.astype(np.int32)).to(device) for x in (part.ids, part.prompt, part.total)]
            for part in rows.values()
        ]
        self._orders = [np.empty(0, np.int64) for _ in rows]

    def next(self) -> None:
        """Fill `batch`, always the same tensors."""
        for n, size in enumerate(self._sizes):
            while len(self._orders[n]) < size:
                fresh = self._rng.permutation(len(self._parts[n][0]))
                self._orders[n] = np.concatenate([self._orders[n], fresh])
            chosen, self._orders[n] = self._orders[n][:size], self._orders[n][size:]
            index = torch.from_numpy(chosen).to(self._parts[n][0].device)
            for target, source in zip(self.batch[n], self._parts[n], strict=True):
                target.copy_(source[index])


def backward(model: Model, feed: Feed, seen: Tensor) -> Tensor:
    """The loss of feed.batch, with gradients. seen: gets the summed loss of the answers and their tokens."""
    for w in model.weights.values():
        if w.requires_grad:
            if w.grad is None:
                w.grad = torch.zeros_like(w)
            w.grad.zero_()
    running = model.running()
    parts = [model.loss(running, *rows) for rows in feed.batch]
    loss = torch.stack([part[0] for part in parts]).sum() / torch.stack([part[2] for part in parts]).sum()
    loss.backward()
    seen.copy_(torch.stack([part[1] for part in parts]).sum(0))
    return loss.detach()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def prepared(
    step: Callable[[], None], gradients: Callable[[], tuple[float, float]], device: torch.device, fuse: bool
) -> Callable[[], None]:
    """The fastest form of the step that works here: fused and captured, captured, or as it is. gradients: loss and norm
    of the gradient of the first batch, by which a fused step is checked."""
    if device.type != "cuda":
        return step
    wanted = gradients()
    for fused in (True, False) if fuse else (False,):
        layers.ENABLED["fuse"] = fused
        try:
            found = gradients()
            log(
                f"fused {fused}: loss {found[0]:.5f} (plain {wanted[0]:.5f}), gradient {found[1]:.5f} ({wanted[1]:.5f})"
            )
            if not all(
                math.isclose(one, other, rel_tol=0.02) for one, other in zip(found, wanted, strict=True)
            ):
                raise ArithmeticError("the fused step computes something else")
            return captured(step)
        except Exception as error:
            log(f"fused {fused} does not work here: {type(error).__name__}: {str(error)[:2000]}")
            torch.cuda.synchronize()
    return step


def share(progress: float) -> float:
    """Of the peak learning rate at this part of the run: up, then a cosine to nothing."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (min(progress, 1.0) - WARM_UP) / (1 - WARM_UP))


def train(args: argparse.Namespace, device: torch.device) -> Model:
    """The trained model; its checkpoint is written."""
    family = FAMILIES[args.family]
    maker = corpus.Maker(family.name, args.out, args.seed, args.chats, args.processes, args.shares)
    sample = corpus.in_rows([corpus.part((family.name, args.out, args.seed + 1, SAMPLE, args.shares))])
    model = Model(family, device, SEED)
    if args.resume:
        checkpoint.load(model, args.resume)
    feed = Feed(sample, args.batch, device)
    rate, seen = torch.zeros((), device=device), torch.zeros(2, device=device)
    optimizer = Optimizer(*model.parts(), rate)
    feed.next()

    def step() -> None:
        backward(model, feed, seen)
        optimizer.step()
        model.balance()

    def gradients() -> tuple[float, float]:
        loss = backward(model, feed, seen)
        norms = torch._foreach_norm([w.grad for w in model.weights.values() if w.grad is not None])
        return float(loss), float(torch.stack(norms).norm())

    run = prepared(step, gradients, device, args.fuse)
    log("the step is prepared")
    rows = maker.rows()
    feed.load(rows, device)
    for length, part in rows.items():
        log(f"{len(part.ids)} chats of up to {length} tokens")
    log(f"{describe(model.config)}; {feed.tokens} tokens a step; training begins")
    start, count, told = time.monotonic(), 0, time.monotonic()
    budget = args.seconds - (start - BEGAN)
    if args.steps is None and budget <= 0:
        raise SystemExit(
            f"the step was prepared after {start - BEGAN:.0f} s: --seconds {args.seconds:g} leaves nothing"
        )
    while (progress := (time.monotonic() - start) / budget if args.steps is None else count / args.steps) < 1:
        rate.fill_(args.rate * share(progress))
        feed.next()
        run()
        count += 1
        if count % 16 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # the schedule follows the clock, so the queue must not run away
        if time.monotonic() - told > 10 or count == args.steps:
            told = time.monotonic()
            log(f"step {count}, {100 * progress:.0f} %, loss of answers {float(seen[0] / seen[1]):.4f}")
            if not math.isfinite(float(seen[0])):
                raise FloatingPointError("the loss is not finite")
    log(
        f"{count} steps, {count * feed.tokens / 1e6:.1f} M tokens with padding, {count * args.batch / args.chats:.1f} epochs"
    )
    checkpoint.save(model, args.out)
    record = {
        "steps": count,
        "chats": args.chats,
        "batch": args.batch,
        "tokens_a_step": feed.tokens,
        "seed": args.seed,
        "rate": args.rate,
        "shares": args.shares,
        "resumed": args.resume is not None,
        "seconds": round(time.monotonic() - start, 1),
    }
    (args.out / "training.json").write_text(json.dumps(record) + "\n")
    log("checkpoint written")
    return model


def shares(text: str) -> dict[str, int]:
    """tool_call=25,counting=10."""
    return {kind: int(number) for kind, _, number in (part.partition("=") for part in text.split(","))}


def main() -> int:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=400, help="end of training, from the start of the process"
    )
    parser.add_argument("--steps", type=int, help="train so many steps, whatever time they take")
    parser.add_argument("--chats", type=int, default=400_000)
    parser.add_argument("--batch", type=int, help="chats a step")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="begin with this checkpoint's weights")
    parser.add_argument("--rate", type=float, default=1.0, help="of the usual learning rates")
    parser.add_argument("--seed", type=int, default=SEED, help="of the chats")
    parser.add_argument(
        "--shares", type=shares, default={}, metavar="KIND=N,...", help="so many of these kinds in the mix"
    )
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", type=Path, default=FOLDER / "eval.jsonl")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false")
    args = parser.parse_args()
    args.batch = args.batch or BATCH[args.family]
    device = torch.device(args.device)
    torch.set_flush_denormal(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(SEED)
    torch._dynamo.config.recompile_limit = 64
    torch.fx.experimental._config.use_duck_shape = False
    model = train(args, device)
    layers.ENABLED["fuse"] = False
    result = evaluate(model, args.out, args.cases)
    (args.out / "evaluation.json").write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    for line in report(result):
        log(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
