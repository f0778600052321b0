"""Writes smollm2_greedy.json: what transformers' own ``generate`` answers to 20 prompts, with the margin of each token.

    python tests/data/make_smollm2_reference.py

``margins[i]`` is the gap between the two largest logits at output position i, relative to the largest absolute logit: where it is
below 1e-4 another batch shape may tip the choice, and tokens are compared up to there (docs/design.md, rule 1).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

from core.fetch import fetch_model

HERE = Path(__file__).parent
NUM_TOKENS = 24
TEXT = (
    "A quire is a gathering of pages. The first printers folded large sheets so that each gave four, eight or sixteen leaves, and "
    "sewed the gatherings together to make a book. Paper was dear, so a page that could be shared was shared. Long before that, "
    "monks had copied books by hand; a scribe who made a mistake scraped the ink away and wrote the word again. Rivers carried "
    "timber to the mills, and mills turned rags into paper. Every town that had a press soon had a paper, and every paper a debate."
)
QUESTIONS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "One, two, three,",
    "The opposite of hot is",
    "My favourite colour is",
    "Once upon a time",
    "The largest planet is",
    "import numpy as np",
    "In 2024,",
)


def prompts(tokenizer) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """Ten short ones and ten of 17 to 91 tokens, which is below, at and above block edges."""
    text = tokenizer.encode(TEXT).ids
    return [tokenizer.encode(q).ids for q in QUESTIONS] + [text[3 * i : 3 * i + 17 + 11 * i] for i in range(10)]


@torch.inference_mode()
def answer(model, prompt: list[int]) -> tuple[list[int], list[float]]:  # type: ignore[no-untyped-def]
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=-1,
        pad_token_id=0,
        do_sample=False,
        output_scores=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = []
    for logits in out.logits:
        top = torch.topk(logits[0], 2).values
        margins.append(round(((top[0] - top[1]) / logits.abs().max()).item(), 7))
    return out.sequences[0, len(prompt) :].tolist(), margins


def reference() -> list[dict]:
    folder = fetch_model()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for prompt in prompts(tokenizer):
        tokens, margins = answer(model, prompt)
        rows.append({"prompt": prompt, "output": tokens, "margins": margins})
    return rows


if __name__ == "__main__":
    torch.set_num_threads(2)
    rows = reference()
    lines = ",\n".join(json.dumps(row) for row in rows)
    (HERE / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")
    print(
        f"{len(rows)} prompts of {min(len(r['prompt']) for r in rows)} to {max(len(r['prompt']) for r in rows)} tokens",
        file=sys.stderr,
    )
