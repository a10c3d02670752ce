"""What lies in the folder: complete checkpoints, the newest few, and damage that is noticed before it does harm."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from meshkit.checkpoint import Checkpointer, _checkpointer, _dcp, _folder
from meshkit.errors import CheckpointError
from tests.checkpoint.training import build, refusal, saved_run
from tests.world import pool


def saves_with_keep(folder: str, keep: int | None, asynchronous: bool) -> list[list[int]]:
    """The complete steps seen while step after step is saved."""
    training = build("dp_shard=2")
    seen = []
    with Checkpointer(folder, keep=keep, asynchronous=asynchronous) as checkpointer:
        for step in (1, 2, 3, 4):
            training.train(1)
            checkpointer.save(step, training.run, training.optimizer, **training.holders)
            checkpointer.wait()
            seen.append(checkpointer.steps())
    return seen


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_newest_k_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    expected = [[1], [1, 2], [2, 3], [3, 4]]
    assert pool(2).run(saves_with_keep, str(tmp_path), 2, asynchronous) == [expected] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def order_of_a_save(folder: str) -> list[str]:
    """What a save does, as far as other ranks and devices are concerned."""
    training, seen = build("dp_shard=2"), list[str]()
    training.train(1)

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        return call

    module = "meshkit.checkpoint._checkpointer"
    with (
        mock.patch(f"{module}.wait_for_device", noted("device", lambda device: None)),
        mock.patch(f"{module}.gather_results", noted("all ranks", _checkpointer.gather_results)),
        mock.patch.object(_checkpointer.HostCopies, "copy", noted("pin", _checkpointer.HostCopies.copy)),
        Checkpointer(folder) as checkpointer,
    ):
        checkpointer.save(1, training.run, training.optimizer, **training.holders)
    return seen


def test_memory_is_pinned_when_all_ranks_have_waited_for_their_devices(tmp_path: Path) -> None:
    for seen in pool(2).run(order_of_a_save, str(tmp_path)):
        assert seen == ["device", "all ranks", "pin"]


def test_keep_none_keeps_all(tmp_path: Path) -> None:
    assert pool(2).run(saves_with_keep, str(tmp_path), None, True)[0][-1] == [1, 2, 3, 4]


def test_keep_0_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"keep=0: keep at least the newest 1, or None"):
        Checkpointer("anywhere", keep=0)


def resume_and_save(folder: str, steps: int) -> tuple[int, list[int]]:
    training = build("dp_shard=2", seed=1)
    with Checkpointer(folder) as checkpointer:
        start = checkpointer.resume(training.run, training.optimizer, **training.holders)
        training.train(steps)
        checkpointer.save(start + steps, training.run, training.optimizer, **training.holders)
    return start, checkpointer.steps()


def test_leftovers_of_a_killed_save_are_ignored_then_removed(tmp_path: Path) -> None:
    pool(2).run(saved_run, str(tmp_path), "dp_shard=2")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".incomplete-step-00000003")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".removed-step-00000000")
    (tmp_path / "notes").mkdir()
    assert Checkpointer(tmp_path).latest() == 2
    assert pool(2).run(resume_and_save, str(tmp_path), 1) == [(2, [1, 2, 3])] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "notes",
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]


def test_a_folder_without_checkpoints_resumes_at_step_0(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "new").latest() is None
    assert pool(2).run(resume_and_save, str(tmp_path / "new"), 1) == [(0, [1])] * 2


def full_disk(folder: str) -> tuple[str, list[int], list[int]]:
    """Rank 1's disk is full at step 2, and has room again at step 3."""
    training = build("dp_shard=2")
    with Checkpointer(folder) as checkpointer:

        def save(step: int) -> None:
            training.train(1)
            checkpointer.save(step, training.run, training.optimizer, **training.holders)

        save(1)
        checkpointer.wait()
        with pytest.MonkeyPatch.context() as patch:
            if training.run.mesh.rank == 1:
                patch.setattr(_dcp._ChecksumStream, "write", _no_space)
            save(2)
            text = refusal(checkpointer.wait)
        after_failure = checkpointer.steps()
        save(3)
    return text, after_failure, checkpointer.steps()


def _no_space(stream: Any, data: bytes) -> int:
    raise OSError(28, "No space left on device")


def test_an_error_in_the_background_surfaces_on_every_rank_and_the_next_save_works(tmp_path: Path) -> None:
    results = pool(2).run(full_disk, str(tmp_path))
    assert results[0] == results[1]
    text, after_failure, after_next = results[0]
    assert re.match(r"CheckpointError: writing \S+step-00000002 on rank 1: No space left in .*bytes needed", text)
    assert after_failure == [1]
    assert after_next == [1, 3]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000001", "step-00000003"}


def error_at_next_save(folder: str) -> str:
    training = build("dp_shard=2")
    checkpointer = Checkpointer(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dcp._ChecksumStream, "write", _no_space)
        checkpointer.save(1, training.run, training.optimizer)
        return refusal(lambda: checkpointer.save(2, training.run, training.optimizer))


def test_without_a_wait_the_error_surfaces_at_the_next_save(tmp_path: Path) -> None:
    texts = pool(2).run(error_at_next_save, str(tmp_path))
    assert len(set(texts)) == 1
    assert "on rank 0: No space left" in texts[0]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two ranks."""
    folder = tmp_path_factory.mktemp("sound")
    pool(2).run(saved_run, str(folder), "dp_shard=2")
    return folder


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def load_damaged(folder: str) -> tuple[str, bool, int, bool]:
    """(error, whether nothing changed, step loaded explicitly, whether that changed something)."""
    training = build("dp_shard=2", seed=1)
    training.train(1)
    before = training.local_state()
    checkpointer = Checkpointer(folder)

    def load(step: int | None) -> int:
        return checkpointer.load(training.run, training.optimizer, **training.holders, step=step)

    text = refusal(lambda: load(None))
    untouched = training.local_state() == before
    return text, untouched, load(1), training.local_state() != before


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        ("__1_0.distcp", truncate, r"has \d+ bytes, but \d+ were written\. The first key in it is 'model\.\S+'"),
        (
            "__0_0.distcp",
            flip,
            r"is damaged: its digest is \w{12}, not \w{12} as written\. The first key in it is '\S+'",
        ),
        ("__1_0.distcp", remove, r"is missing\. The first key in it is '\S+'"),
        (".metadata", flip, r"is damaged: its digest is .* The first key in it is '\S+'"),
        ("index.json", flip, r"is damaged: its digest is .* The first key in it is '\S+'"),
        ("state.json", flip, r"is damaged: its digest is .* The first key in it is 'scheduler'"),
        ("config.json", truncate, r"has \d+ bytes, but \d+ were written\."),
        ("manifest.json", flip, r"is damaged: "),
        ("manifest.json", truncate, r"is damaged: "),
        ("manifest.json", remove, r"is missing: the checkpoint was changed after it was complete"),
    ],
)
def test_damage_is_found_before_anything_is_loaded_and_the_step_before_is_named(
    sound: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], what: str
) -> None:
    folder = shutil.copytree(sound, tmp_path / "damaged")
    damage(folder / "step-00000002" / name)
    results = pool(2).run(load_damaged, str(folder))
    assert results[0] == results[1]
    text, untouched, loaded, changed = results[0]
    assert re.match(rf"CheckpointError: \S+step-00000002/{re.escape(name)} {what}", text), text
    assert "The newest sound checkpoint before it is step 1: pass step=1" in text
    assert untouched
    assert loaded == 1
    assert changed


def first_load(folder: str) -> str:
    training = build("dp_shard=2")
    return refusal(lambda: Checkpointer(folder).load(training.run, training.optimizer, **training.holders))


def test_with_no_sound_checkpoint_left_the_error_says_so(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "damaged")
    for step in (1, 2):
        flip(folder / f"step-{step:08d}" / "__0_0.distcp")
    texts = pool(2).run(first_load, str(folder))
    assert len(set(texts)) == 1
    assert "step-00000002/__0_0.distcp is damaged" in texts[0]
    assert "there is no sound checkpoint before it" in texts[0]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


class Asked:
    """As enums of Python 3.11.0 to 3.11.3 write themselves: getattr(kind, name)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (type(TensorProperties().__getstate__()[3]), self.name)


def swapped_index(folder: Path, name: str, content: bytes) -> None:
    """An index in the place of the one that was written, which the manifest vouches for, as an attacker would do."""
    (folder / name).write_bytes(content)
    manifest = _folder.read_manifest(folder)
    found = _folder.checksum_file(folder / name)
    file = _folder.File(bytes=found.bytes, digest=found.digest)
    _folder.write_manifest(folder, replace(manifest, files={**manifest.files, name: file}))


def elsewhere(content: bytes) -> bytes:
    metadata = pickle.loads(content)
    for index, storage in metadata.storage_data.items():
        metadata.storage_data[index] = replace(storage, relative_path=f"../{storage.relative_path}")
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda content: pickle.dumps(Evil()), "it names posix.system, which no checkpoint's index does"),
        (lambda content: pickle.dumps(Asked("__new__")), "it asks for '__new__' of"),
        (lambda content: pickle.dumps(Asked("TORCH_PRESERVE_FORMAT")), "it holds a _MEM_FORMAT_ENCODING"),
        (lambda content: pickle.dumps([1, 2]), "it holds a list"),
        (lambda content: content[:-40], "is damaged"),
        (elsewhere, "it names '../__0_0.distcp', which is not in its folder"),
    ],
)
def test_a_pickled_index_runs_no_code_and_names_no_other_folder(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    step = shutil.copytree(sound, tmp_path / "changed") / "step-00000002"
    swapped_index(step, ".metadata", change((step / ".metadata").read_bytes()))
    with pytest.raises(CheckpointError, match=re.escape(what)):
        _dcp.read_index(step, pickled=True)
    assert _dcp.read_index(step).tensors  # of what meshkit wrote, the pickle is not looked at
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text.replace("__0_0.distcp", "../__0_0.distcp"), "'../__0_0.distcp', which is not in its folder"),
        (lambda text: text.replace('"float64"', '"load"'), "a tensor of 'load', which this torch does not have"),
        (lambda text: "[" * 100_000, "RecursionError"),
        (lambda text: "[1]", "is damaged"),
        (lambda text: text.replace("chunks", "chunk"), "is damaged"),
    ],
)
def test_an_index_that_the_manifest_vouches_for_is_data_still(
    sound: Path, tmp_path: Path, change: Callable[[str], str], what: str
) -> None:
    folder = shutil.copytree(sound, tmp_path / "changed")
    step = folder / "step-00000002"
    swapped_index(step, "index.json", change((step / "index.json").read_text()).encode())
    with pytest.raises(CheckpointError, match=re.escape(what)):
        _dcp.read_index(step)
    for text in pool(2).run(first_load, str(folder)):
        assert "index.json is damaged" in text


def test_a_step_under_another_name_is_not_loaded(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "renamed")
    (folder / "step-00000002").rename(folder / "step-00000007")
    for text in pool(2).run(first_load, str(folder)):
        assert "step-00000007 is not the step that its name says: it was saved as step-00000002" in text


def test_any_flipped_bit_of_the_manifest_is_noticed(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "damaged") / "step-00000002"
    data = (folder / "manifest.json").read_bytes()
    checkpointer = Checkpointer(tmp_path / "damaged")
    assert checkpointer.config(2) == {"width": 24}
    for place in range(0, len(data), 97):
        for bit in (0, 5):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            (folder / "manifest.json").write_bytes(changed)
            if bytes(changed).split() != data.split():  # white space means nothing in JSON
                with pytest.raises(CheckpointError, match=r"manifest.json (is damaged|has format)"):
                    checkpointer.config(2)


def test_the_manifest_says_what_is_there(sound: Path) -> None:
    folder = sound / "step-00000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 2
    assert manifest["world_size"] == 2
    assert manifest["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert manifest["torch"] == torch.__version__
    assert manifest["tensors"]["embed_tokens.weight"] == [[61, 24], "float64"]
    listed = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    assert listed == {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"}


def config_and_extra(folder: str) -> None:
    training = build("dp_shard=2")
    with Checkpointer(folder) as checkpointer:
        extra = {"skipped": 3, "loss": torch.tensor(1.5)}
        checkpointer.save(1, training.run, None, config={"lr": 0.1, "mesh": {"tp": 2}}, extra=extra)


def test_configuration_and_extra_are_read_back_without_a_world(tmp_path: Path) -> None:
    pool(2).run(config_and_extra, str(tmp_path))
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.config(1) == {"lr": 0.1, "mesh": {"tp": 2}}
    assert checkpointer.extra(1) == {"skipped": 3, "loss": torch.tensor(1.5)}
    flip(tmp_path / "step-00000001" / "state.safetensors")
    with pytest.raises(CheckpointError, match=r"state\.safetensors is damaged"):
        checkpointer.extra(1)
    with pytest.raises(CheckpointError, match=r"load\(step=7\): \S+ holds the steps 1\."):
        checkpointer.config(7)
