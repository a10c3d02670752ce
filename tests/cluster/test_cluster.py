"""Clusters as data: what a file may say, and what it is told where it says something else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.cluster import Cluster, Device, Measured, Tier
from meshkit.errors import ClusterError

NAMES = ("a100", "b200", "cpu", "h100", "h200", "mi300x")


def test_the_datasheets_are_those_of_the_documentation() -> None:
    assert Cluster.names() == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_datasheet_is_read_names_its_source_and_survives_a_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.read(name)
    assert cluster.name == name and cluster.source and cluster.level == "datasheet"
    cluster.write(tmp_path / "mine.toml")
    assert Cluster.read(tmp_path / "mine.toml") == cluster


def test_an_unknown_name_is_told_the_datasheets() -> None:
    with pytest.raises(ClusterError, match=r"'h99': there is no such file or datasheet.*a100, b200, cpu"):
        Cluster.read("h99")


def test_a_misspelt_field_is_told_its_nearest() -> None:
    text = Cluster.read("h100").to_toml().replace("launch_s", "launches_s")
    with pytest.raises(ClusterError, match="mine: device: there is no 'launches_s'. Did you mean 'launch_s'"):
        Cluster.from_toml(text, source="mine")


def test_a_missing_field_is_named() -> None:
    text = "\n".join(
        line for line in Cluster.read("h100").to_toml().splitlines() if not line.startswith("memory_bytes =")
    )
    with pytest.raises(ClusterError, match="mine: device: 'memory_bytes' is missing"):
        Cluster.from_toml(text, source="mine")


def test_a_text_in_place_of_a_number_is_shown() -> None:
    text = Cluster.read("h100").to_toml().replace("ranks = 8", 'ranks = "8"')
    with pytest.raises(ClusterError, match=r"mine: tiers\[0\]: ranks='8': give a number"):
        Cluster.from_toml(text, source="mine")


DEVICE = Device(name="d", memory_bytes=1e9, memory_bytes_per_s=1e9, flops_per_s={"float32": 1e9})
NODE = Tier(name="node", ranks=4, bytes_per_s=1e9, latency_s=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Cluster(name="c", device=DEVICE, tiers=()), "'c' has no tier"),
        (
            lambda: Cluster(name="c", device=DEVICE, tiers=(NODE, replace(NODE, ranks=6))),
            "'node' of 6 ranks comes after",
        ),
        (lambda: replace(NODE, ranks=0), "ranks=0: a whole number"),
        (lambda: replace(NODE, bytes_per_s=0.0), "bytes_per_s=0.0"),
        (lambda: replace(NODE, per="switch"), "per='switch': choose rank, rail or group"),  # type: ignore[arg-type]
        (lambda: replace(DEVICE, flops_per_s={}), "give the peak of each dtype"),
        (lambda: DEVICE.peak_flops_per_s("float8"), "d has no peak for float8, only for float32"),
        (lambda: Measured(op="gossip", tier="node", ranks=2, points=((1, 1),)), "op='gossip': choose one of"),
        (lambda: Measured(op="send", tier="node", ranks=2, points=((2, 1), (1, 1))), "by growing"),
        (
            lambda: Cluster(
                name="c",
                device=DEVICE,
                tiers=(NODE,),
                collectives=(Measured(op="send", tier="rail", ranks=2, points=((1, 1),)),),
            ),
            "there is no tier 'rail', only node",
        ),
    ],
)
def test_what_no_machine_could_be_is_refused(make: object, text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        make()  # type: ignore[operator]


def test_a_number_is_changed_by_its_path() -> None:
    cluster = Cluster.read("h100").changed(**{"device.efficiency.matmul": 0.5, "tiers.1.latency_s": 1e-3})
    assert cluster.device.efficiency.matmul == 0.5 and cluster.tiers[1].latency_s == 1e-3
    assert cluster.tiers[0] == Cluster.read("h100").tiers[0]


def test_a_file_that_cannot_be_read_and_memory_below_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for content, said in ((b"\xff", "not UTF-8 at byte 0"), (b"a=" + b"[" * 100_000, "this is no TOML")):
        path.write_bytes(content)
        with pytest.raises(ClusterError, match=said):
            Cluster.read(path)
    for name in ("context_bytes", "communicator_bytes"):
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ClusterError, match=f"device.{name}={wrong}"):
                Cluster.read("h100").changed(**{f"device.{name}": wrong})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_bytes_per_s = .*", "memory_bytes_per_s = inf", "device: memory_bytes_per_s=inf: give a finite number"),
        ("memory_bytes_per_s = .*", f"memory_bytes_per_s = {'9' * 400}", "memory_bytes_per_s=9+: give a finite number"),
        ("bfloat16 = .*", "bfloat16 = nan", "flops_per_s.bfloat16=nan: give a finite number"),
        ("launch_s = .*", "launch_s = 1e-6\nmemory_curve = [[1024, inf]]", "memory_curve=inf: give a finite number"),
    ],
)
def test_a_number_of_a_file_is_finite(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "c.toml"
    text, changed = re.subn(f"(?m)^{old}$", new, Cluster.read("h100").to_toml(), count=1)
    assert changed
    path.write_text(text)
    with pytest.raises(ClusterError, match=said) as error:
        Cluster.read(path)
    assert "\n" not in str(error.value)
