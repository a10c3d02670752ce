"""Parameter names in Hugging Face files: one tensor per expert, although experts are stacked in memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshkit.core.arguments import require
from meshkit.core.model_state import full_model_of, full_state
from meshkit.core.quantized_weight import BlockCodes
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.errors import PlanError
from meshkit.lora import is_adapter, lora_of, refuse_peft
from meshkit.models.deepseek import DeepseekV3
from meshkit.models.huggingface.converted import file_parts
from meshkit.models.moe import MixtralConfig
from meshkit.models.reward import RewardModel

MIXTRAL_WEIGHTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_proj|up_proj|down_proj)")
# Training state of a router, which these files do not hold; they hold its bias for DeepSeek alone.
TRAINING_STATE = (".last_counts", ".e_score_correction_bias")


class Piece(NamedTuple):
    """One tensor of a file: a full tensor of the model, or one expert of stacked ones.

    rows: of what it is a part of, None for all: gate or up of a fused projection. transposed: the file has it so.
    packed: for a low-bit weight of the model, its codes and the number of values in a row.
    """

    tensor: Tensor
    expert: int | None = None
    packed: tuple[BlockCodes, int] | None = None
    rows: slice | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        if self.packed is not None:
            return (*self.tensor.shape[:-1], self.packed[1])
        shape = tuple(self.tensor.shape if self.expert is None else self.tensor.shape[1:])
        if self.rows is not None:
            shape = (self.rows.stop - self.rows.start, *shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def identity(self) -> tuple[int, int | None, int | None]:
        """Equal for all names of one tied parameter."""
        return id(self.tensor), self.expert, None if self.rows is None else self.rows.start

    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, full: Tensor) -> Tensor:
        """This piece of the full tensor of the model."""
        part = full if self.expert is None else full[self.expert]
        part = part if self.rows is None else part[self.rows]
        return part.mT if self.transposed else part

    def local(self) -> tuple[tuple[slice, ...], Tensor] | None:
        """(region of the piece that this rank holds, its memory here), or None if the rank holds nothing of it."""
        if self.tensor.is_meta:  # another stage holds it
            return None
        region, local = local_slices(self.tensor), local_tensor(self.tensor)
        if self.expert is not None:
            experts = region[0]
            if not experts.start <= self.expert < experts.stop:
                return None
            region, local = region[1:], local[self.expert - experts.start]
        if self.rows is not None:
            first, last = max(region[0].start, self.rows.start), min(region[0].stop, self.rows.stop)
            if first >= last:
                return None
            local = local[first - region[0].start : last - region[0].start]
            region = (slice(first - self.rows.start, last - self.rows.start), *region[1:])
        if self.transposed:
            region, local = region[::-1], local.mT
        if self.packed is not None:
            codes, columns = self.packed
            # Bytes to columns. The last block of a row may be padded, so its end in columns is beyond the row's.
            ends = (min(codes.columns(end), columns) for end in (region[-1].start, region[-1].stop))
            region = (*region[:-1], slice(*ends))
        return (region, local) if local.numel() else None

    def write(self, local: Tensor, values: Tensor) -> None:
        """Write values of the file into `local`, both of the region that `local()` names."""
        local.copy_(values if self.packed is None else self.packed[0].encode(values.to(local.device)))


def named_pieces(model: nn.Module, verb: str) -> dict[str, Piece]:
    """Parameters and persistent buffers by their names in Hugging Face files; a tied one under each of its names.

    Without adapters, which have files of their own: see `adapter_pieces`.
    """
    require(verb, "model", model, nn.Module)
    refuse_peft(model, verb)
    tensors = full_state(model)
    lora = lora_of(model)
    if lora is None:
        return _pieces(model, tensors, verb)
    codes = lora.base
    packed = {id(tensors[f"{name}.weight"]): columns for name, columns in lora.packed.items()}
    pieces = _pieces(model, {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}, verb)
    return {
        key: piece._replace(packed=(codes, packed[id(piece.tensor)])) if codes and id(piece.tensor) in packed else piece
        for key, piece in pieces.items()
    }


def adapter_pieces(model: nn.Module, verb: str) -> dict[str, Piece]:
    """Adapters and modules that train whole beside them, by the names that the model's files would have for them."""
    refuse_peft(model, verb)
    lora = lora_of(model)
    if lora is None:
        raise PlanError(f"{verb}: the model has no adapters. Call mk.lora on it before parallelize().")
    saved_modules = tuple(f"{name}." for name in lora.saved)
    tensors = {
        name: tensor for name, tensor in full_state(model).items() if is_adapter(name) or name.startswith(saved_modules)
    }
    return _pieces(model, tensors, verb, adapters=True)


def _pieces(model: nn.Module, tensors: dict[str, Tensor], verb: str, *, adapters: bool = False) -> dict[str, Piece]:
    elsewhere = full_model_of(model) is not None
    for name, tensor in tensors.items():
        if tensor.is_meta and not elsewhere:
            raise PlanError(f"{verb}: {name!r} is still on meta. Call parallelize() or model.to_empty() first.")
    foreign = hasattr(model, "save_pretrained")  # a transformers model, whose names PEFT's files have as they are
    if adapters if foreign else any(name.startswith("model.") for name in tensors):
        return {name: Piece(tensor) for name, tensor in tensors.items()}
    if foreign:
        return {
            key: Piece(tensors[part.name], part.at, rows=part.rows, transposed=part.transposed)
            for key, part in file_parts(model, tensors, verb).items()
        }
    pieces = {
        key: piece
        for name, tensor in tensors.items()
        if not name.endswith(TRAINING_STATE[:1] if isinstance(model, DeepseekV3) else TRAINING_STATE)
        for key, piece in _in_files(model, name, tensor)
    }
    return pieces if adapters else pieces | _shared_copies(model, tensors)


def _in_files(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Piece]]:
    key = name if name.startswith(("lm_head.", "score.")) else f"model.{_layer_name(model, name)}"
    mixtral = isinstance(getattr(model, "config", None), MixtralConfig)  # a reward model is no Mixtral
    if mixtral:
        key = key.replace(".mlp.", ".block_sparse_moe.")
    stacked = STACKED.fullmatch(key)
    if stacked is None:
        yield key, Piece(tensor)
        return
    projection = stacked["projection"]
    projection = MIXTRAL_WEIGHTS[projection] if mixtral else projection
    for expert in range(tensor.shape[0]):
        yield f"{stacked['experts']}.{expert}.{projection}.weight", Piece(tensor, expert)


def _layer_name(model: nn.Module, name: str) -> str:
    """DeepSeek's files have the modules of `mtp` as more layers, with the decoder layer's parts among their own."""
    if not isinstance(model, DeepseekV3) or not name.startswith("mtp."):
        return name
    _, index, rest = name.split(".", 2)
    # The last norm of a module lies in DeepSeek's shared_head, beside the copy of the head.
    rest = f"shared_head.{rest}" if rest.startswith("norm.") else rest.removeprefix("layer.")
    return f"layers.{model.config.num_hidden_layers + int(index)}.{rest}"


def _shared_copies(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Piece]:
    """Second names of embedding and head, which DeepSeek's files repeat in each module of `mtp`."""
    copies: dict[str, Piece] = {}
    if isinstance(model, DeepseekV3):
        # Of `tensors`, and not of the modules: those of another stage of a pipeline have no values here.
        for index in range(len(model.mtp)):
            layer = f"model.layers.{model.config.num_hidden_layers + index}"
            copies[f"{layer}.embed_tokens.weight"] = Piece(tensors["embed_tokens.weight"])
            copies[f"{layer}.shared_head.head.weight"] = Piece(tensors["lm_head.weight"])
    return copies


def is_ignored(model: nn.Module, key: str) -> bool:
    """Whether loading skips a tensor of the file: rotary frequencies, which every implementation recomputes; modules for
    multi-token prediction, if the DeepseekV3 has none; the language-model head, for a reward model.
    """
    if key.endswith("rotary_emb.inv_freq") or (key == "lm_head.weight" and isinstance(model, RewardModel)):
        return True
    if not isinstance(model, DeepseekV3) or len(model.mtp):
        return False
    layer: Any = re.match(r"model\.layers\.(\d+)\.", key)
    return layer is not None and int(layer[1]) >= model.config.num_hidden_layers
