"""Export of a trained model: a Hugging Face or PEFT folder with its tokenizer and chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from meshkit.core.digests import add_digests
from meshkit.data import Chat, Tokenizer, save_chat_template, save_tokenizer
from meshkit.lora import lora_of
from meshkit.models import save_lora, save_pretrained
from meshkit.step import Run

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def export_model(
    run: Run, folder: Path, encoder: Chat | Tokenizer, *, came_from: Path | None = None, base: Path | None = None
) -> None:
    """Write a folder that transformers reads or, of a model with adapters, one that PEFT reads. Every rank must call it.

    encoder: its tokenizer is written, and of a chat the template. came_from: the folder of that tokenizer, whose files are
    then copied, with all that only transformers knows of it. base: of adapters, the folder of the frozen model.
    Wire, memory: as `save_pretrained`. Raises: CheckpointError, on every rank, if the folder is not empty.
    """
    tokenizer = encoder.tokenizer if isinstance(encoder, Chat) else encoder
    if lora_of(run.model) is None:
        config: Any = run.full_model.config
        # transformers' generate stops at the config's eos, whatever the tokenizer says.
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        save_pretrained(run.model, config, folder, extra=ids)
    else:
        save_lora(run.model, folder, base=None if base is None else str(base))
    # After the weights, in which every rank takes part. What follows are small files of one rank.
    if run.mesh.rank != 0:
        return
    # Copied as they are: rewritten from our Tokenizer they would lose added tokens and options that only transformers
    # knows.
    if came_from is None:
        save_tokenizer(tokenizer, folder)
    else:
        files = [came_from / name for name in _TOKENIZER_FILES if (came_from / name).exists()]
        for file in files:
            shutil.copy(file, folder)
        add_digests(folder, {file.name: folder / file.name for file in files})
    if isinstance(encoder, Chat):
        save_chat_template(encoder.template, folder)
