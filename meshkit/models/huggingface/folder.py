"""Hugging Face folders (config.json, safetensors): load_pretrained into shards, save_pretrained from them, streaming."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshkit.core.digests import check_digests, digest_all, listed
from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.core.model_state import full_model_of, full_state, group_of, note
from meshkit.core.sharding import full_tensor
from meshkit.errors import CheckpointError, MeshkitError, PlanError
from meshkit.lora import lora_of
from meshkit.models.deepseek import DeepseekV3, DeepseekV3Config
from meshkit.models.huggingface.block_scales import BlockScales
from meshkit.models.huggingface.config import (
    CONFIG_FILE,
    FAMILIES,
    ModelConfig,
    config_to_dict,
    is_fp8,
    read_json,
    write_config,
)
from meshkit.models.huggingface.names import Piece, is_ignored, named_pieces
from meshkit.models.llama import Llama, LlamaConfig
from meshkit.models.moe import Mixtral, MixtralConfig, Qwen3Moe, Qwen3MoeConfig
from meshkit.models.reward import RewardModel

WEIGHTS_FILE = "model.safetensors"
# A regression: transformers' pipeline puts one label of anything else through a sigmoid.
_ONE_LABEL = {"id2label": {"0": "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
INDEX_FILE = "model.safetensors.index.json"


def build_model(config: ModelConfig) -> nn.Module:
    """Build the model of a config, with the initial values of torch's own modules."""
    match config:
        case MixtralConfig():
            return Mixtral(config)
        case Qwen3MoeConfig():
            return Qwen3Moe(config)
        case DeepseekV3Config():
            return DeepseekV3(config)
        case LlamaConfig():
            return Llama(config)


# --------------------------------------------------------------------------------------------------------- reading


def load_pretrained(model: nn.Module, folder: str | os.PathLike[str], *, fresh: Iterable[str] = ()) -> nn.Module:
    """Read the safetensors of a Hugging Face folder into the model's parameters and persistent buffers, in place.

    They may be plain tensors or DTensors on any mesh: each rank reads only the regions it holds, one tensor at a time,
    and converts them to the parameter's dtype and device; fp8 in blocks is multiplied by its scales (`weight_scale_inv`).
    Nothing is communicated, and nothing is changed if names or shapes do not fit. `model` is one of `meshkit.models` or
    transformers', whose folder has the names that transformers' save_pretrained writes; a tied parameter may be in the
    folder under one of its names or under all. Stacked experts are read expert by expert, those that the rank holds.
    fresh: names of parameters that keep their values if the folder has none, such as the score of a reward model that
    begins as a language model.
    A folder that `save_pretrained` wrote has the digests of its files: each rank reads and compares all weights first, once
    in a process. Another folder has none, and damage that keeps names and shapes is not noticed.
    Raises: CheckpointError for missing, unexpected, misshapen or damaged tensors, naming the first and its file.
    """
    pieces = named_pieces(model, "load_pretrained")
    files = _checked_files(Path(folder))
    scales = BlockScales(Path(folder), files, pieces, open_safetensors)
    # What is skipped is left out before names are compared, or it would be refused as unexpected.
    files = {key: file for key, file in files.items() if not is_ignored(model, key) and not scales.is_scale(key)}
    pieces = {key: piece for key, piece in pieces.items() if key in files or key not in set(fresh)}
    _refuse_other_names(pieces, files, Path(folder))
    for file, keys in _by_file(files).items():
        with open_safetensors(file) as reader:
            for key in keys:  # headers only; all files are checked before the first tensor is changed
                stored = reader.get_slice(key)
                _refuse_other_shape(file, key, stored, pieces[key], scaled=scales.refuse(file, key, stored))
    note(model, "load_pretrained", {"files": {file.name: file.stat().st_size for file in {*files.values()}}})
    loaded: dict[object, str] = {}
    for file, keys in _by_file(files).items():
        with open_safetensors(file) as reader:
            for key in keys:
                local_region = pieces[key].local()
                if local_region is None:
                    continue
                region, local = local_region
                # A tied parameter may come twice. The second must equal what was just loaded: silently keeping one of
                # two different weights is another model.
                first = loaded.setdefault(pieces[key].identity, key)
                values = scales.read(file, reader, key, region)
                if first == key:
                    pieces[key].write(local, values)
                elif not torch.equal(local, values.to(local)):
                    raise CheckpointError(
                        f"{file}: {key!r} and {first!r} differ, but are one tied parameter in the model. Build it with "
                        "tie_word_embeddings=False."
                    )
    return model


def _is_read(name: str) -> bool:
    return name.endswith(".safetensors") or name in (INDEX_FILE, CONFIG_FILE)


def check_pretrained(folder: str | os.PathLike[str]) -> None:
    """Read the digests and headers of a folder's weights, before anything that takes long; `load_pretrained` does so itself.

    Raises: CheckpointError for files that are missing or damaged.
    """
    for file in _by_file(_checked_files(Path(folder))):
        with open_safetensors(file):
            pass


def _checked_files(folder: Path) -> dict[str, Path]:
    check_digests(folder, [name for name in listed(folder, CheckpointError) if _is_read(name)], CheckpointError)
    return _weight_files(folder)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Name of each tensor in the folder -> the file that holds it."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists():
        with open_safetensors(single) as reader:
            return dict.fromkeys(reader.keys(), single)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: there is no such folder. Name one that holds a model's {WEIGHTS_FILE} or {INDEX_FILE}; nothing is "
            "downloaded."
        )
    if not index.exists():
        raise CheckpointError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}.")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is damaged: it has no weight_map.")
    for key, name in weight_map.items():
        if not (isinstance(name, str) and name and Path(name).name == name):
            raise CheckpointError(f"{index} is damaged: {key!r} is in {name!r}, which is no file of this folder.")
    return {key: folder / name for key, name in weight_map.items()}


def _by_file(files: dict[str, Path]) -> dict[Path, list[str]]:
    out: dict[Path, list[str]] = {}
    for key, file in files.items():
        out.setdefault(file, []).append(key)
    return out


def _refuse_other_names(pieces: dict[str, Piece], files: dict[str, Path], folder: Path) -> None:
    present = {pieces[key].identity for key in files if key in pieces}
    missing = [key for key, piece in pieces.items() if piece.identity not in present]
    unexpected = [key for key in files if key not in pieces]
    if missing and missing[0].endswith((".enorm.weight", ".hnorm.weight", ".eh_proj.weight")):
        raise CheckpointError(
            f"{folder} has no tensor {missing[0]!r}, of a module that predicts further ahead; transformers writes none. "
            "Build the model with num_nextn_predict_layers=0."
        )
    if missing:
        raise CheckpointError(
            f"{folder} has no tensor {missing[0]!r}, which the model needs ({len(missing)} of {len(pieces)} are "
            f"missing, {len(unexpected)} are unexpected). Build the model from this folder's {CONFIG_FILE}."
        )
    if unexpected:
        raise CheckpointError(
            f"{files[unexpected[0]]} holds {unexpected[0]!r}, which the model does not have ({len(unexpected)} are "
            f"unexpected). Build the model from this folder's {CONFIG_FILE}."
        )


def _refuse_other_shape(file: Path, key: str, stored: Any, piece: Piece, *, scaled: bool) -> None:
    """scaled: it is fp8 with scales."""
    tensor = piece.tensor
    if tuple(stored.get_shape()) != piece.shape:
        raise CheckpointError(
            f"{file}: {key!r} has the shape {tuple(stored.get_shape())}, but the model's has {piece.shape}. "
            f"Build the model from this folder's {CONFIG_FILE}."
        )
    converted = tensor.is_floating_point() or piece.packed is not None
    if converted and not scaled and stored.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise CheckpointError(
            f"{file}: {key!r} has the dtype {stored.get_dtype()}, which cannot be converted to {tensor.dtype}. "
            "Quantised files are not supported."
        )


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """A safetensors reader whose errors name the file."""
    if not file.is_file():
        what = "is no file" if file.exists() else "does not exist"
        raise CheckpointError(f"{file} {what}, but {INDEX_FILE} refers to it.")
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or incomplete: {error}.") from error


# --------------------------------------------------------------------------------------------------------- writing


def save_pretrained(
    model: nn.Module,
    config: ModelConfig | Mapping[str, object],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, object] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder that transformers' `from_pretrained` and `load_pretrained` read. Every rank must call it.

    config: of the model; for a transformers model `model.config.to_dict()`. dtype: of the file's floating tensors, None
    keeps the model's. extra: more fields for config.json, see `save_config`. beside: writes more files into the folder that
    it is given, on rank 0. The folder must not exist or be empty; it appears under its name when it is complete, and not
    before, with the digests of its files in meshkit_digests.json.
    Wire: the all-gathers of one tensor at a time; with pp also one message to rank 0 for each tensor of other stages.
    Memory: rank 0 holds one file, at most max_shard_bytes or one larger tensor, and all ranks one tensor of the model,
    of stacked experts all.
    Raises: CheckpointError, on every rank, if the folder is not empty; PlanError for a config that no family has.
    """
    folder = Path(folder)
    if lora_of(model) is not None:
        raise PlanError(
            "save_pretrained: the model has adapters, which such a folder has no place for. Call mk.lora.merge first, or "
            "write them alone by mk.models.save_lora."
        )
    raw = _config_of(model, config)
    pieces = named_pieces(model, "save_pretrained")
    # Reversed, so that the first name of a tied parameter overwrites later ones and the file holds it once.
    first_names = {piece.identity: key for key, piece in reversed(pieces.items())}
    pieces = {key: piece for key, piece in pieces.items() if first_names[piece.identity] == key}
    shards = _split(pieces, max_shard_bytes, dtype)
    partial = folder.with_name(f".{folder.name}.partial")  # renamed when complete, so no reader sees half a folder

    def begin() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"save_pretrained: {folder} exists and is not empty. Choose another folder or remove it."
            )
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
        partial.mkdir(parents=True)

    def finish() -> None:
        if failed:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"save_pretrained: {folder} was not written: {failed[0]}") from failed[0]
        if len(shards) > 1:
            total = sum(_bytes(piece, dtype) for piece in pieces.values())
            weight_map = {key: file for file, keys in shards.items() for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        write_config(raw, partial, extra)
        for file in shards:  # safetensors makes files that their owner alone can read
            shutil.copymode(partial / CONFIG_FILE, partial / file)
        if beside is not None:
            beside(partial)
        digest_all(partial)
        partial.rename(folder)

    on_rank_zero(model, begin)
    full_tensors = _full_tensors(model, pieces, everywhere=False)
    failed: list[Exception] = []
    for file, keys in shards.items():
        tensors = _tensors_on_rank_zero(model, {key: pieces[key] for key in keys}, full_tensors, dtype)
        # Rank 0 goes on gathering after a failure, and says so at the end: alone it would leave the others in a collective.
        if is_rank_zero(model) and not failed:
            try:
                save_tensors(tensors, partial / file)
            except (CheckpointError, OSError, SafetensorError) as error:
                failed.append(error)
    on_rank_zero(model, finish)


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write one file. Raises: CheckpointError for a full disk, which safetensors says in words of its own."""
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with telling_of_a_full_disk(CheckpointError, f"writing {file.name}", file.parent, needed):
        save_file(tensors, file, metadata={"format": "pt"})


def _config_of(model: nn.Module, config: ModelConfig | Mapping[str, object]) -> Mapping[str, object]:
    raw = config_to_dict(config) if isinstance(config, ModelConfig) else config
    if is_fp8(raw) and not _holds_fp8(model):
        # Said of the files that it was read from; these hold plain numbers.
        raw = {name: value for name, value in raw.items() if name != "quantization_config"}
    if not isinstance(model, RewardModel):
        return raw
    name = FAMILIES[str(raw["model_type"])].architecture.replace("CausalLM", "SequenceClassification")
    return {**raw, **_ONE_LABEL, "architectures": [name]}


def _holds_fp8(model: nn.Module) -> bool:
    return any(param.dtype == torch.float8_e4m3fn for param in model.parameters())


def _tensors_on_rank_zero(
    model: nn.Module, pieces: dict[str, Piece], full_tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The tensors of one file, on the host. Every rank takes as many full tensors, since each is a collective."""
    tensors = {}
    for key, full in islice(full_tensors, len(pieces)):
        if is_rank_zero(model):
            # A copy, for safetensors takes no two tensors in one storage.
            copy = pieces[key].expert is not None or pieces[key].rows is not None
            tensors[key] = full.to("cpu", _saved_dtype(full, dtype), copy=copy).contiguous()
    return tensors


def stream_pretrained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in a Hugging Face folder, whole tensor) of each parameter and persistent buffer, on every rank of the model.

    For weight sync to an inference engine. A tied parameter comes under each of its names. Every rank must take all of
    them, in step. Do not write into them. Dtype and device are the model's.
    Wire: the all-gathers of one tensor at a time; with pp also a broadcast of each over the stages.
    Memory: one tensor of the model, of stacked experts all.
    Raises: PlanError for a model with adapters.
    """
    if lora_of(model) is not None:
        raise PlanError(
            "stream_pretrained: the model has adapters, which are no weights of their own. Call mk.lora.merge."
        )
    yield from _full_tensors(model, named_pieces(model, "stream_pretrained"), everywhere=True)


def _full_tensors(model: nn.Module, pieces: dict[str, Piece], *, everywhere: bool) -> Iterator[tuple[str, Tensor]]:
    """(key, full tensor) of each piece, one tensor of the model at a time; on meta where `gatherer` does not deliver it."""
    owners, gather = gatherer(model, everywhere=everywhere)
    # (the model's tensor, its full tensor): stacked experts are gathered once, and not once for each expert.
    gathered: tuple[Tensor, Tensor] | None = None
    for key, piece in pieces.items():
        if gathered is None or gathered[0] is not piece.tensor:
            gathered = None  # frees the last full tensor before the next is gathered
            gathered = piece.tensor, gather(piece.tensor, owners.get(id(piece.tensor), 0))
        yield key, piece.of(gathered[1])


def gatherer(model: nn.Module, *, everywhere: bool = False) -> tuple[dict[int, int], Callable[[Tensor, int], Tensor]]:
    """(owners, gather): rank of pp that holds a tensor, by its id; gather(tensor, owner) returns the full tensor.

    gather is a collective of the ranks that hold the tensor and of the model's rank 0, which gets it; other ranks get it as
    it is, on meta. everywhere: a collective of all ranks of the model, which all get it.
    """
    full_model = full_model_of(model)
    if full_model is None:
        return {}, lambda tensor, owner: full_tensor(tensor)
    group, rank = full_model.group, dist.get_rank(full_model.group)
    # Every pp group has a rank 0, and only one of these is the model's rank 0: in the other groups nobody needs the
    # full tensor.
    reaches_zero = dist.get_global_rank(group, 0) == dist.get_process_group_ranks(group_of(model))[0]
    state = full_state(model)

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=next(model.parameters()).device)

    def gather(tensor: Tensor, owner: int) -> Tensor:
        # Only ranks of the owner's stage hold shards, and all of them take part in the gather.
        value = full_tensor(tensor).contiguous() if rank == owner else tensor
        if everywhere:
            value = value if rank == owner else empty(tensor)
            dist.broadcast(value, group=group, group_src=owner)
        elif reaches_zero and owner != 0 and rank == owner:
            _in_a_batch(dist.isend, value, group, 0)
        elif reaches_zero and owner != 0 and rank == 0:
            value = empty(tensor)
            _in_a_batch(dist.irecv, value, group, owner)
        return value

    return {id(state[name]): owner for name, owner in full_model.owners.items()}, gather


def _in_a_batch(op: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """A message outside of a batch would make a communicator of the two ranks."""
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, group=group, group_peer=peer)]):
        work.wait()


def _split(pieces: dict[str, Piece], max_bytes: float, dtype: torch.dtype | None) -> dict[str, list[str]]:
    """File name -> the tensors in it, in order, each file filled up to max_bytes."""
    files: list[list[str]] = [[]]
    room = max_bytes
    for key, piece in pieces.items():
        size = _bytes(piece, dtype)
        if files[-1] and size > room:
            files.append([])
            room = max_bytes
        files[-1].append(key)
        room -= size
    if len(files) == 1:
        return {WEIGHTS_FILE: files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": keys for number, keys in enumerate(files, 1)}


def _bytes(piece: Piece, dtype: torch.dtype | None) -> int:
    return piece.numel() * _saved_dtype(piece.tensor, dtype).itemsize


def _saved_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_rank_zero(model: nn.Module) -> bool:
    """Whether this is rank 0 of the ranks that hold the model."""
    return not _distributed() or dist.get_rank(group_of(model)) == 0


def on_rank_zero(model: nn.Module, action: Callable[[], None]) -> None:
    """Call `action` on the model's rank 0; other ranks wait, and raise the same error. Wire: one broadcast of a string."""
    # A rank that raised alone would leave the others in the next collective: all hear of it before anyone raises.
    refusal: list[str | None] = [None]
    if is_rank_zero(model):
        try:
            action()
        except (MeshkitError, OSError) as error:
            refusal = [str(error)]
    if _distributed():
        dist.broadcast_object_list(refusal, group=group_of(model), group_src=0)
    if refusal[0] is not None:
        raise CheckpointError(refusal[0])
