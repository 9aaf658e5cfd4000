"""What transformers makes of the golden DeepSeek-V3, V3.2 and GLM-5, in float32: `python
scripts/reference/deepseek_v3_tiny.py` writes tests/goldens/deepseek_v3-tiny and its kin. The checkpoints are those of
tests/deepseek_v3_form.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from deepseek_v3_form import CHECKPOINTS, CONFIG, GOLDENS, NAME  # noqa: E402

from openinfer.recipes.engine.testing.checkpoint import write_tensors  # noqa: E402

LENGTHS, NEW, POSITIONS = (1, 7, 64, 150, 300), 32, 2
"""Of prompts; tokens that follow each; and the last positions whose logits are kept."""
FEW = (64, 300)
"""Lengths of V3.2's and GLM-5's, so that goldens stay small."""


def write(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS[name], dtype=torch.float32)
    model.eval()
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    facts: dict[str, Any] = {
        "name": name, "versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "prompts": [],
    }  # fmt: skip
    for index, length in enumerate(LENGTHS if name == NAME else FEW):
        ids = rng.integers(3, CONFIG["vocab_size"], length)
        tokens, margins = list(map(int, ids)), []
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
            for _ in range(NEW):
                last = model(torch.tensor([tokens])).logits[0, -1]
                best = torch.topk(last, 2).values
                margins.append(float(best[0] - best[1]))
                tokens.append(int(last.argmax()))
        positions = list(range(max(0, length - POSITIONS), length))
        arrays |= {
            f"p{index}.ids": ids.astype(np.int32),
            f"p{index}.greedy_ids": np.array(tokens[length:], np.int32),
            f"p{index}.logits_fp32": logits[positions].numpy().astype(np.float32),
        }
        facts["prompts"].append(
            {"length": length, "logit_positions": positions, "logits_std": float(logits.std()),
             "greedy_margin_min": min(margins)}
        )  # fmt: skip
    folder = GOLDENS / name
    folder.mkdir(exist_ok=True)
    write_tensors(folder / "golden.safetensors", arrays)
    text = json.dumps(facts, indent=1) if name == NAME else json.dumps(facts, separators=(",", ":"))
    (folder / "golden.json").write_text(text + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    for one in sys.argv[1:] or CHECKPOINTS:
        write(one)
