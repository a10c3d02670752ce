"""Export of a trained model: a folder that transformers, PEFT and vLLM read, with tokenizer, chat template and stop ids."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshkit.core.read_file import read_json_object
from meshkit.data import Chat, Tokenizer, load_chat, load_tokenizer, save_chat_template, save_tokenizer
from meshkit.errors import CheckpointError, DataError, PlanError
from meshkit.lora import lora_of
from meshkit.models import RewardModel, save_lora, save_pretrained

if TYPE_CHECKING:
    from meshkit.step._run import Run

GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

Encoder = Chat | Tokenizer | str | os.PathLike[str]
"""A tokenizer, with its chat template or without, or the folder that holds one"""


def export(
    run: Run, folder: str | os.PathLike[str], encoder: Encoder | None, base: str | os.PathLike[str] | None
) -> None:
    """What `Run.export` says."""
    encoder = _read(encoder) if isinstance(encoder, str | os.PathLike) else encoder
    tokenizer = encoder.tokenizer if isinstance(encoder, Chat) else encoder
    model = run.full_model
    own = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    # Adapters and scores write nothing by themselves: what says how to generate is of the model beneath.
    begun = _generation_config(model, encoder) if not isinstance(model, RewardModel) and encoder is not None else None
    beside = partial(_write_beside, encoder=encoder, generation_config=begun)
    if lora_of(run.model) is not None:
        save_lora(run.model, folder, base=None if base is None else os.fspath(base), beside=beside)
        return
    if isinstance(model, RewardModel) and tokenizer is not None:
        own["pad_token_id"] = _pad_of_scores(tokenizer)
    save_pretrained(run.model, _config(model), folder, extra=own, beside=beside)


def _read(folder: str | os.PathLike[str]) -> Chat | Tokenizer:
    tokenizer = load_tokenizer(folder)
    return _chat_of(tokenizer) or tokenizer


def _chat_of(tokenizer: Tokenizer) -> Chat | None:
    """With the template of the folder that it is from, if there is one."""
    try:
        return None if tokenizer.folder is None else load_chat(tokenizer.folder)
    except DataError:
        return None


def _config(model: Any) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise PlanError(
            f"run.export: {type(model).__name__} has no config, from which others could build it. Give it one of "
            "transformers or of mk.models, or keep its weights by mk.Checkpointer."
        )
    if not hasattr(config, "to_dict"):
        return config
    # One that was built from a config, and read from no folder, does not say its class.
    return {**config.to_dict(), "architectures": config.architectures or [type(model).__name__]}


def _generation_config(model: Any, encoder: Chat | Tokenizer) -> dict[str, Any]:
    """Where the tokenizer is from says how its model samples and stops; the chat template says what ends an answer."""
    tokenizer = encoder.tokenizer if isinstance(encoder, Chat) else encoder
    source = None if tokenizer.folder is None else tokenizer.folder / GENERATION_CONFIG
    if source is not None and source.exists():
        begun = read_json_object(source, DataError)
    else:
        theirs = getattr(model, "generation_config", None)  # of a transformers model
        begun = {} if theirs is None else theirs.to_diff_dict()
    begun.pop("_from_model_config", None)  # else transformers reads config.json in its place
    said = begun.get("eos_token_id")
    chat = encoder if isinstance(encoder, Chat) else _chat_of(encoder)
    ends = [tokenizer.eos_id, *(said if isinstance(said, list) else [] if said is None else [said])]
    stops = list(dict.fromkeys([*ends, *(() if chat is None else chat.end_ids)]))
    pad = begun.get("pad_token_id")
    return {
        **begun,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "pad_token_id": tokenizer.pad_id if pad is None else pad,
    }


def _pad_of_scores(tokenizer: Tokenizer) -> int | None:
    # transformers scores the last token that is no padding. An answer's last token is eos: where that pads as well, rows
    # have to be scored one by one, which transformers says itself if there is no padding token.
    return None if tokenizer.pad_id == tokenizer.eos_id else tokenizer.pad_id


def _write_beside(folder: Path, *, encoder: Chat | Tokenizer | None, generation_config: dict[str, Any] | None) -> None:
    """On one rank, into the folder that has the weights and not yet its name."""
    if encoder is None:
        return
    if generation_config is not None:
        (folder / GENERATION_CONFIG).write_text(json.dumps(generation_config, indent=2) + "\n")
    tokenizer = encoder.tokenizer if isinstance(encoder, Chat) else encoder
    if tokenizer.folder is None:
        save_tokenizer(tokenizer, folder)
    else:
        # As they are: written anew they would lose what transformers alone knows of. The mode is a new file's.
        if not (tokenizer.folder / "tokenizer.json").exists():
            raise CheckpointError(
                f"run.export: {tokenizer.folder}, from which the tokenizer was read, holds no tokenizer.json any more. Put "
                "it back, or give the tokenizer of another folder."
            )
        for name in _TOKENIZER_FILES:
            if (tokenizer.folder / name).exists():
                shutil.copyfile(tokenizer.folder / name, folder / name)
        if (more := tokenizer.folder / "additional_chat_templates").is_dir():
            shutil.copytree(more, folder / more.name, copy_function=shutil.copyfile)
    if isinstance(encoder, Chat):
        save_chat_template(encoder.template, folder)
