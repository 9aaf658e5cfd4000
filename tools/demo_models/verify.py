"""Hold a trained checkpoint against transformers, and measure its MTP head.

    python tools/demo_models/verify.py FAMILY DIR [--cases FILE]

Prints the largest difference of float32 logits between the model that was trained and transformers, the score of
transformers' greedy answers to the held-out cases, and how many one-token MTP drafts of these answers were right.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import answers
import checkpoint
import torch
import torch_deepseek_v4
from corpus import examples
from families import FAMILIES
from model import Model
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from openinfer.cli.bench import eval_cases


def reference(folder: Path) -> Any:
    """transformers' model in float32; FP8 and FP4 weights are expanded."""
    options = {}
    if "quantization_config" in AutoConfig.from_pretrained(folder).to_dict():
        from transformers import FineGrainedFP8Config

        options["quantization_config"] = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    return model.float().eval()


@torch.no_grad()
def compare(model: Model, theirs: Any, folder: Path) -> None:
    """Logits of a few chats."""
    w = model.running(torch.float32)
    for tokens, _ in examples(model.family.name, folder, 99, 12):
        ids = torch.tensor(tokens.astype("int64"))[None]
        padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % 128))
        states, _ = model.code.hidden_states(w, model.config, padded)
        ours = torch.nn.functional.linear(states, w[model.code.HEAD]).float()[:, : ids.shape[1]]
        logits = theirs(ids, use_cache=False).logits.float()
        print(
            f"{ids.shape[1]} tokens: max |dlogit| {(ours - logits).abs().max():.1e}, std {logits.std():.1f}"
        )


@torch.no_grad()
def answer(model: Model, theirs: Any, folder: Path, cases: Path) -> None:
    """Greedy answers of transformers, one at a time with its cache; MTP drafts of the same answers by our model."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    render, end = model.family.renderer(), tokenizer.token_to_id(model.family.end.strip())
    results, hits, drafted, began = [], 0, 0, time.monotonic()
    for case in eval_cases.load_cases(cases):
        prompt = render(case.messages, tools=case.tools or None, kwargs={"enable_thinking": case.thinking})
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        sequence = theirs.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=answers.MAX_NEW,
            eos_token_id=end,
            pad_token_id=end,
        )[0].tolist()
        text = tokenizer.decode([t for t in sequence[len(ids) :] if t != end], skip_special_tokens=False)
        content, calls = answers.read(model.family.name, case, text)
        results.append((case.kind, eval_cases.passed(case.check, content, calls)))
        if model.code.MTP:
            right, count = answers.accepted(model, [sequence], [len(ids)])
            hits, drafted = hits + right, drafted + count
    for kind, (good, count) in eval_cases.scores(results).items():
        print(f"{kind:<16} {good:>4} of {count:<4} {good / count:.1%}")
    if drafted:
        print(f"MTP: {hits} of {drafted} drafts right, {hits / drafted:.1%}")
    print(f"{time.monotonic() - began:.0f} s")


def main() -> int:
    """Print everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=Path)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    torch_deepseek_v4.ROUNDING["activations"] = False  # transformers does not round them
    model = Model(FAMILIES[args.family], torch.device("cpu"), 0)
    checkpoint.load(model, args.folder)
    theirs = reference(args.folder)
    compare(model, theirs, args.folder)
    if args.cases:
        answer(model, theirs, args.folder, args.cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
