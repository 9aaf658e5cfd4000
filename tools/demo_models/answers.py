"""Greedy answers of a torch model to the held-out cases, and their scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import torch
from model import Model
from tokenizers import Tokenizer

from openinfer.cli.bench import eval_cases

MAX_NEW = 160
FORMATS = {"qwen3": "hermes", "qwen3_5": "qwen3_xml", "deepseek_v4": "deepseek_v4"}


def evaluate(model: Model, folder: Path, cases: Path, rows: int = 128) -> dict[str, Any]:
    """Scores by kind, how many MTP drafts of the answers' tokens were right, and the first wrong answers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    render = model.family.renderer()
    loaded = eval_cases.load_cases(cases)
    prompts = [
        tokenizer.encode(
            render(case.messages, tools=case.tools or None, kwargs={"enable_thinking": case.thinking}),
            add_special_tokens=False,
        ).ids
        for case in loaded
    ]
    end = tokenizer.token_to_id(model.family.end.strip())
    order = sorted(range(len(loaded)), key=lambda n: len(prompts[n]))
    results, wrong, hits, drafted = [], [], 0, 0
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        sequences = generate(model, [prompts[n] for n in batch], end)
        if model.code.MTP:
            right, count = accepted(model, sequences, [len(prompts[n]) for n in batch])
            hits, drafted = hits + right, drafted + count
        for n, sequence in zip(batch, sequences, strict=True):
            text = tokenizer.decode(
                [t for t in sequence[len(prompts[n]) :] if t != end], skip_special_tokens=False
            )
            content, calls = read(model.family.name, loaded[n], text)
            good = eval_cases.passed(loaded[n].check, content, calls)
            results.append((loaded[n].kind, good))
            if not good:
                wrong.append(
                    {
                        "kind": loaded[n].kind,
                        "ask": loaded[n].messages[-1]["content"],
                        "check": loaded[n].check,
                        "text": text,
                    }
                )
    scores = {kind: f"{good}/{count}" for kind, (good, count) in eval_cases.scores(results).items()}
    return {"scores": scores, "mtp_accepted": round(hits / drafted, 4) if drafted else None, "wrong": wrong}


def read(family: str, case: eval_cases.EvalCase, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, as the server's parser finds them."""
    chat = families.frontend("chat")
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in case.tools}
    within = case.thinking and family != "qwen3"
    parser = chat.OutputParser(
        reasoning=True,
        tools=chat.TOOL_FORMATS[FORMATS[family]] if case.tools else None,
        schemas=schemas,
        in_reasoning=within,
    )
    parts = [*parser.push(text), *parser.flush()]
    content = "".join(part.text for part in parts if isinstance(part, chat.Content))
    return content.strip(), [(part.name, part.arguments) for part in parts if isinstance(part, chat.ToolCall)]


@torch.no_grad()
def generate(model: Model, prompts: list[list[int]], end: int) -> list[list[int]]:
    """Each prompt with its greedy answer, `end` included where it came. Every step reads everything again."""
    device = next(iter(model.weights.values())).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    size = -(-(int(lengths.max()) + MAX_NEW) // 128) * 128
    ids = torch.zeros(len(prompts), size, dtype=torch.long, device=device)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    done = torch.zeros_like(lengths, dtype=torch.bool)
    w = {name: value.detach() for name, value in model.running().items() if not name.endswith("gate.load")}
    everyone = torch.arange(len(prompts), device=device)
    for step in range(MAX_NEW):
        width = min(-(-int(lengths.max()) // 128) * 128, size)
        token = model.logits(w, ids[:, :width], lengths - 1).argmax(-1)
        ids[everyone, lengths] = torch.where(done, ids[everyone, lengths], token)
        lengths = lengths + (~done).long()
        done |= token == end
        if step % 8 == 7 and bool(done.all()):
            break
    return [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]


@torch.no_grad()
def accepted(model: Model, sequences: list[list[int]], prompts: list[int]) -> tuple[int, int]:
    """MTP drafts of the answers' tokens that were what the model wrote, and all of them."""
    device = next(iter(model.weights.values())).device
    size = -(-max(map(len, sequences)) // 128) * 128
    ids = torch.zeros(len(sequences), size, dtype=torch.long, device=device)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, device=device)
    w = {name: value.detach() for name, value in model.running().items() if not name.endswith("gate.load")}
    drafts = model.drafts(w, ids)[:, :-1]
    place = torch.arange(drafts.shape[1], device=device)[None] + 2
    first = torch.tensor(prompts, device=device)[:, None]
    last = torch.tensor([len(s) for s in sequences], device=device)[:, None]
    counted = (place > first) & (place < last)
    return int(((drafts == ids[:, 2:]) & counted).sum()), int(counted.sum())


def report(result: dict[str, Any]) -> Iterator[str]:
    """Lines for the log."""
    yield f"held out: {json.dumps(result['scores'])}"
    yield f"MTP drafts accepted: {result['mtp_accepted']}"
    for one in result["wrong"][:12]:
        yield f"wrong: {json.dumps(one, ensure_ascii=False)[:600]}"
