"""Small preference data for recipes: words go on in their usual order in chosen answers, and backwards in rejected ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

from meshkit.data import CHATML, CHATML_TOKENS, ChatTemplate, save_chat_template, save_tokenizer, train_tokenizer

ROWS = 60


def write_pairs(folder: Path, *, chats: bool = False) -> tuple[Path, Path]:
    """(JSONL of pairs, folder of a tokenizer with a chat template); rows have a kind and a margin."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 5))) for _ in range(30)]
    rows = []
    for number in range(ROWS):
        first, length = generator.randrange(30), generator.randint(3, 8)
        answer = [words[(first + i) % 30] for i in range(length)]
        prompt, chosen, rejected = words[first - 1] + " ", " ".join(answer), " ".join(reversed(answer))
        if chats:
            prompt = [{"role": "user", "content": prompt}]
            chosen, rejected = ([{"role": "assistant", "content": each}] for each in (chosen, rejected))
        fields = {"kind": ("even", "odd")[number % 2], "margin": length / 10}
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, **fields})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer([" ".join(words)], vocab_size=320, extra_special_tokens=CHATML_TOKENS)
    save_tokenizer(tokenizer, folder / "tokenizer")
    save_chat_template(ChatTemplate(source=CHATML), folder / "tokenizer")
    return path, folder / "tokenizer"
