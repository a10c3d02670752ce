"""Flags of given data: text, instructions, preferences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshkit.data import Truncation, WrongBody
from meshkit.recipes.flags._model import ModelFlags
from meshkit.recipes.ranges import Count, Share


@dataclass(frozen=True, kw_only=True)
class TextFlags(ModelFlags):
    """Text for a language model, and its evaluation on held-out text."""

    data: tuple[str, ...] = ()
    """text, JSONL or Parquet files, folders or patterns; empty: Python's standard library"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json; default: that of --pretrained, or one trained on the data, once"""
    cache: Path = Path("~/.cache/meshkit")
    """tokenizers and tokens made from the data"""
    eval_batches: Count = 8


@dataclass(frozen=True, kw_only=True)
class PretrainFlags(TextFlags):
    """Pretraining on short documents, and a sample of generated text at the end."""

    mixture: tuple[str, ...] = ()
    """in place of --data: NAME=PATH:WEIGHT of each source, whose weights need not add up to 1"""
    documents: bool = True
    """attention and positions stop at the end of a document"""
    explain: bool = False
    """print what each rank holds and sends, by mk.explain"""
    prompt: str = "import os\n\n\ndef "
    """of the sample"""
    sample_tokens: Count = 80


@dataclass(frozen=True, kw_only=True)
class InstructionFlags(ModelFlags):
    """Supervised fine-tuning (SFT): chats and instructions, whose answers are learnt."""

    data: tuple[str, ...] = ()
    """JSONL or Parquet files, or folders of `datasets`; empty: Python's standard library"""
    eval_data: tuple[str, ...] = ()
    """rows that are only evaluated on; empty: a part of --data"""
    held_out: Share = 0.1
    """that part"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json and a chat template; default: that of --pretrained, or one trained on the data"""
    turns: Literal["all", "last"] = "all"
    """which answers of a chat are learnt"""
    end_of_turn: Literal["template", "learn", "ignore"] = "template"
    """whether the token that ends an answer is learnt; "template": as the chat template marks it"""
    truncate: Truncation = "drop"
    """how to treat rows longer than seq_len"""
    allow: tuple[str, ...] = ()
    """problems of the data to accept, by the names that the error gives them"""


@dataclass(frozen=True, kw_only=True)
class PairFlags(ModelFlags):
    """Preferences: a prompt, a chosen and a rejected answer."""

    data: tuple[Path, ...] = ()
    """JSONL, Parquet or Arrow files, or folders of them; empty: functions of Python's standard library"""
    split: str | None = None
    """which split of a saved data set with several"""
    held_out: Share = 0.1
    """part of the rows that is only evaluated on"""
    tokenizer: Path | None = None
    """folder with a tokenizer and, for messages, its chat template; default: --pretrained's, or one trained here, once"""
    kinds: tuple[WrongBody, ...] = ("scrambled", "reversed", "repeated")
    """without --data: how bodies are made wrong; mismatched is the body of another function"""
    limit_bytes: Count = 400
    """without --data: longer functions are left out"""
    truncate: Truncation = "drop"
    """how to treat a pair longer than seq_len"""
    cache: Path = Path("~/.cache/meshkit")
    """the tokenizer made from the data"""
