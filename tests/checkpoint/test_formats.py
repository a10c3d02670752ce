"""Formats: values without pickles, checkpoints of formats 1 and 2, and folders of DCP that another program wrote."""

from __future__ import annotations

import json
import re
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from meshkit.checkpoint import Checkpointer, load_dcp
from meshkit.checkpoint._values import decode, encode
from meshkit.core.digests import digest_file, digest_json
from meshkit.core.sharding import full_tensor
from tests.checkpoint.training import build, refusal
from tests.world import pool

VALUES = [
    None,
    True,
    2**80,
    -0.0,
    float("inf"),
    "é\0",
    b"\xff",
    (1, (2, [3])),
    {1: "a", (2, "b"): [None]},
    {"is": "tensor", "at": "0"},
    {"a": {3, 1}, "b": torch.float8_e4m3fn},
    OrderedDict(z=1, a=torch.Size([2, 3])),
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.arange(6, dtype=torch.uint8).reshape(2, 3).T,
        torch.ones(2).bfloat16(),
    ],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    def flat(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.tolist()
        return [flat(each) for each in value] if isinstance(value, list) else value

    back = decode(*encode(value))
    assert flat(back) == flat(value)
    assert type(back) is type(value) or isinstance(value, dict)


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, 1j, torch.eye(2).to_sparse(), pytest, {"a": [print]}], ids=range(6)
)
def test_what_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="it holds a "):
        encode(value)


SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}


def load_old(folder: str) -> tuple[bool, dict[str, Any], dict[str, Any], str, list[int]]:
    training = build("dp_shard=2", seed=1, **SHAPE)
    training.train(1)
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        assert checkpointer.config(2) == {"width": 8}
        assert checkpointer.extra(2) == {"skipped": 3, "loss": torch.tensor(1.5)}
        checkpointer.resume(training.run, training.optimizer, **training.holders)
        truth = load_file(Path(folder) / "truth.safetensors")
        whole = training.whole_state()
        equal = whole.keys() == truth.keys() and all(torch.equal(whole[name], truth[name]) for name in truth)
        states = training.scheduler.state_dict(), training.loader.state_dict()
        training.train(1)
        checkpointer.save(3, training.run, training.optimizer, **training.holders)
        (Path(folder) / "step-00000002" / "state.pt").write_bytes(b"no")
        return equal, *states, refusal(lambda: checkpointer.load(training.run, None, step=2)), checkpointer.steps()


def test_a_checkpoint_of_format_1_is_read_bit_for_bit_and_the_next_is_of_format_3(tmp_path: Path) -> None:
    # Written by meshkit of format 1, on two ranks, with the values that they had: see SHAPE.
    with tarfile.open(Path(__file__).with_name("format_1.tar.xz")) as files:
        files.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # since 3.11.4
    results = pool(2).run(load_old, str(tmp_path))
    assert len({text for _, _, _, text, _ in results}) == 1
    equal, schedule, position, damaged, steps = results[0]
    assert equal and all(each for each, *_ in results)
    assert schedule["last_epoch"] == 2
    assert position["samples"] == 8
    assert re.search(r"state\.pt has 2 bytes, but \d+ were written", damaged)
    assert steps == [2, 3]
    new = tmp_path / "step-00000003"
    assert '"format": 3' in (new / "manifest.json").read_text()
    assert {"index.json", "state.json", "state.safetensors"} <= {path.name for path in new.iterdir()}


def load_as_format_2(folder: str) -> tuple[bool, str]:
    """A step whose manifest has the digests that format 2 had."""
    training = build("dp_shard=2", seed=1, **SHAPE)
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(1, training.run, training.optimizer)
        before = training.whole_state()
        if dist.get_rank() == 0:
            step = Path(folder) / "step-00000001"
            body = json.loads((step / "manifest.json").read_text())
            assert {each["digest"].partition(":")[0] for each in body["files"].values()} == {"xxh3"}
            for name, each in body["files"].items():
                each["digest"] = digest_file(step / name)
            del body["digest"]
            body["format"] = 2
            (step / "manifest.json").write_text(json.dumps({**body, "digest": digest_json(body)}))
        dist.barrier()
        training.train(1)
        checkpointer.load(training.run, training.optimizer)
        after = training.whole_state()
        if dist.get_rank() == 0:
            path = next(step.glob("*.distcp"))
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        dist.barrier()
        told = refusal(lambda: checkpointer.load(training.run, None))
        return all(torch.equal(before[name], after[name]) for name in before), told


def test_a_checkpoint_of_format_2_has_digests_of_sha256(tmp_path: Path) -> None:
    for equal, told in pool(2).run(load_as_format_2, str(tmp_path)):
        assert equal
        assert "is damaged: its digest is" in told


def foreign(folder: str) -> list[str]:
    training = build("dp_shard=2", seed=3)
    names = {name: full_tensor(param).float() for name, param in training.run.named_parameters()}
    save({"net": dict(names), "epoch": 7}, storage_writer=FileSystemWriter(folder))
    other = build("tp=2", seed=4)
    said = [refusal(lambda: load_dcp(other.run, folder)), refusal(lambda: load_dcp(other.run, f"{folder}/none"))]
    load_dcp(other.run, folder, prefix="net.")
    equal = all(torch.equal(full_tensor(param), names[name].double()) for name, param in other.run.named_parameters())
    wide = build("tp=2", intermediate_size=50)
    return [*said, refusal(lambda: load_dcp(wide.run, folder, prefix="net.")), str(equal)]


def test_a_folder_of_dcp_is_read_when_asked(tmp_path: Path) -> None:
    results = pool(2).run(foreign, str(tmp_path / "dcp"))
    assert results[0] == results[1]
    unnamed, missing, wide, equal = results[0]
    assert "has no 'embed_tokens.weight', which the model needs. It has " in unnamed and "'net." in unnamed
    assert ".metadata is missing. Give a folder that torch.distributed.checkpoint wrote" in missing
    assert "'net.layers.0.mlp.gate_proj.weight' has the shape (45, 24) there and (50, 24) in the model" in wide
    assert equal == "True"
