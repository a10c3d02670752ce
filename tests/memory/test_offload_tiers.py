"""Where activations wait: space, files, threads, errors, and that memory is really freed."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.memory.offload import Offload, offload_of
from meshkit.memory.offload._disk import DiskTier, Files, file_system
from meshkit.memory.offload._host import PAGE, Arena, HostTier, Piece
from meshkit.memory.offload._streams import CpuStreams
from tests.world import pool

# ------------------------------------------------------------------------------------------------------------ space


def test_pieces_never_overlap_and_all_space_comes_back() -> None:
    slabs: list[int] = []
    arena = Arena(lambda index, nbytes: slabs.append(nbytes), slab_bytes=8 * PAGE)
    draw, held = random.Random(0), list[Piece]()
    for _ in range(3000):
        if held and draw.random() < 0.5:
            arena.give(held.pop(draw.randrange(len(held))))
        else:
            held.append(arena.take(draw.randrange(1, 5 * PAGE)))
        assert arena.used_bytes == sum(piece.nbytes for piece in held) <= arena.peak_bytes <= arena.total_bytes
        for slab, size in enumerate(slabs):
            end = 0
            for piece in sorted(piece for piece in held if piece.slab == slab):
                assert piece.offset >= end and piece.offset % PAGE == piece.nbytes % PAGE == 0
                end = piece.offset + piece.nbytes
            assert end <= size
    for piece in held:
        arena.give(piece)
    assert arena._free == [[(0, size)] for size in slabs] and arena.total_bytes == sum(slabs)
    before = arena.total_bytes
    arena.reserve(before + 10 * PAGE)
    assert arena.total_bytes == before + 10 * PAGE
    with pytest.raises(AssertionError, match="given back twice"):
        arena.give(Piece(0, 0, PAGE))


# ------------------------------------------------------------------------------------------------------------- tiers


def bytes_of(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [[1, 4095, 4096, 4097, 100_000], [300_000] * 5])
def test_bytes_come_back_from_the_disk(tmp_path: Path, sizes: list[int]) -> None:
    tier = DiskTier(CpuStreams(), tmp_path, staging=64 << 10, slab_bytes=256 << 10)
    assert tier.files.direct == (file_system(tmp_path) in ("ext4", "xfs", "btrfs")), tier.describe()
    for _ in range(3):
        sources = [bytes_of(size, seed) for seed, size in enumerate(sizes)]
        stored = [tier.store(source) for source in sources]
        for each in stored:
            each.written.result()
        for source, each in reversed(list(zip(sources, stored, strict=True))):
            for _ in range(2):
                target = torch.zeros_like(source)
                assert each.fetch(target)  # from the file
                each.arrive()
                assert torch.equal(target, source)
            each.release()
        tier.tidy()
        assert tier.files.arena.used_bytes == tier.memory.arena.used_bytes == 0
    assert not list(tmp_path.iterdir())  # the files have no names
    assert tier.files.arena.total_bytes <= 2 * sum(sizes) + (256 << 10)


def test_a_fetch_is_served_from_memory_while_its_store_is_under_way(tmp_path: Path) -> None:
    tier = DiskTier(CpuStreams(), tmp_path, staging=1 << 20)
    gate, write = threading.Event(), tier.files.write
    written: list[int] = []

    def slow(piece: Piece, memory: Tensor) -> None:
        gate.wait(20)
        write(piece, memory)
        written.append(piece.offset)

    tier.files.write = slow  # type: ignore[method-assign]
    sources = [bytes_of(5000, seed) for seed in range(8)]  # more than threads: some have not begun
    stored = [tier.store(source) for source in sources]
    for source, each in zip(sources, stored, strict=True):
        target = torch.zeros_like(source)
        assert not each.fetch(target)
        each.arrive()
        assert torch.equal(target, source)
        each.release()
    gate.set()
    tier.threads.shutdown(wait=True)
    tier.tidy()
    assert len(written) <= 4  # what had begun; the rest was never written
    assert tier.files.arena.used_bytes == tier.memory.arena.used_bytes == 0


def test_stores_wait_for_room_in_staging(tmp_path: Path) -> None:
    tier = DiskTier(CpuStreams(), tmp_path, staging=32 << 10, slab_bytes=32 << 10)
    for seed in range(20):
        tier.store(bytes_of(16 << 10, seed))
    assert tier.memory.arena.peak_bytes <= 32 << 10 and tier.files.arena.used_bytes == 20 * (16 << 10)


def test_reserve_is_taken_before_the_first_step(tmp_path: Path) -> None:
    assert HostTier(CpuStreams(), reserve=10 << 20).space.arena.total_bytes == 10 << 20
    assert DiskTier(CpuStreams(), tmp_path, staging=1, reserve=1 << 20).files.arena.total_bytes == 1 << 20


class Pinning(CpuStreams):
    """Notes which slabs are to be pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs: list[tuple[int, bool]] = []

    def slab(self, nbytes: int, *, pinned: bool = True) -> Tensor:
        self.slabs.append((nbytes, pinned))
        return super().slab(nbytes)


@pytest.mark.parametrize("to", ["host", "disk"])
def test_memory_is_pinned_after_the_first_step_and_in_no_step(to: str, tmp_path: Path) -> None:
    """Rows of the third step are longer."""
    streams = Pinning()
    tier = (
        HostTier(streams, slab_bytes=PAGE)
        if to == "host"
        else DiskTier(streams, tmp_path, staging=1 << 20, slab_bytes=PAGE)
    )
    tier.end_step()  # a step in which nothing was offloaded
    assert not streams.slabs
    for size, taken_in_step, taken_after in (
        (3000, [(PAGE, False)], [(PAGE, True)]),
        (3001, [], []),
        (60_000, [(61_440, False)], []),
    ):
        source, target = bytes_of(size, 1), torch.zeros(size, dtype=torch.uint8)
        stored = tier.store(source)
        if isinstance(tier, DiskTier):
            wait([stored.written])
            tier.tidy()
        assert stored.fetch(target)
        stored.arrive()
        assert torch.equal(source, target)
        stored.release()
        assert streams.slabs[:1] == taken_in_step and not any(pinned for _, pinned in streams.slabs)
        streams.slabs.clear()
        tier.end_step()
        assert streams.slabs == taken_after
        streams.slabs.clear()
    if isinstance(tier, HostTier):
        streams.device = torch.device("cuda")
        assert "after the first step are not pinned: give reserve=61440" in tier.describe()


def test_without_o_direct_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshkit.memory.offload._disk._takes_direct", lambda folder: False)
    tier = DiskTier(CpuStreams(), tmp_path, staging=1 << 20)
    assert "through the page cache (no O_DIRECT here)" in tier.describe()
    source, target = bytes_of(9000, 1), torch.zeros(9000, dtype=torch.uint8)
    stored = tier.store(source)
    stored.written.result()
    stored.fetch(target)
    stored.arrive()
    assert torch.equal(target, source)


# ------------------------------------------------------------------------------------------------------------ errors


class Wide(nn.Module):
    """Keeps [rows, 4 x size] four times."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin().cos().tanh())


def wide(blocks: int, size: int, **policy: object) -> tuple[nn.Module, Offload]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide(size) for _ in range(blocks)))
    names = [str(index) for index in range(blocks)]
    mk.offload_activations(model, blocks=names, policy=mk.strategy.ActivationOffload(**policy))  # type: ignore[arg-type]
    offload = offload_of(model)
    assert offload is not None
    return model, offload


def test_a_full_disk_names_the_folder_and_the_bytes(tmp_path: Path) -> None:
    def limited() -> None:
        """The kernel refuses files of this size, as a full disk would."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        model, _ = wide(3, 64, to="disk", folder=tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            model(torch.randn(256, 64)).sum().backward()
        except mk.errors.OffloadError as error:
            text = str(error)
            found = (
                "making a file of 67,108,864 bytes" in text and str(tmp_path) in text and "bytes are free there" in text
            )
            os._exit(0 if found else 2)
        os._exit(3)

    child = os.fork()
    if child == 0:
        limited()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", ["write", "read"])
def test_a_failing_disk_stops_the_run(tmp_path: Path, broken: str) -> None:
    model, offload = wide(3, 64, to="disk", folder=tmp_path, staging=1)
    assert isinstance(offload.tier, DiskTier)
    offload.tier.files.arena.reserve(64 << 20)
    x = torch.randn(256, 64)
    if broken == "write":
        os.close(offload.tier.files._open[0])  # the kernel's own error: a bad descriptor
        offload.tier.files._open[0] = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(mk.errors.OffloadError, match=r"writing [\d,]+ bytes in .* failed: Bad file descriptor"):
            model(x).sum().backward()
    else:
        loss = model(x).sum()
        # a write after the cut would make the file long again
        wait([stored.written for stored in offload.tier._writing])
        os.ftruncate(offload.tier.files._open[0], 0)
        with pytest.raises(mk.errors.OffloadError, match=r"reading [\d,]+ bytes in .* failed: the file ends early"):
            loss.backward()


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        mk.errors.OffloadError, match="cannot be written: Not a directory|cannot be written: File exists"
    ):
        Files(tmp_path / "file")
    monkeypatch.setattr("meshkit.memory.offload._disk.file_system", lambda folder: "tmpfs")
    with pytest.raises(mk.errors.PlanError, match="is a tmpfs, which is memory. Give folder= on a disk"):
        Files(None)
    Files(tmp_path)  # who names a folder means it


# ------------------------------------------------------------------------------------------------------------ memory


def resident_bytes() -> int:
    """What is in use: a warm process holds pages of freed blocks too, and takes its next ones from them."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held_after_forward(to_disk: bool, folder: str) -> tuple[int, int, list[Tensor]]:
    """(resident bytes that a forward leaves, bytes that its blocks save, gradients)"""
    blocks, rows, size = 8, 2048, 128
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide(size) for _ in range(blocks)))
    if to_disk:
        policy = mk.strategy.ActivationOffload(to="disk", folder=Path(folder), staging=8 << 20)
        mk.offload_activations(model, blocks=[str(index) for index in range(blocks)], policy=policy)
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(1))
    model(x[:4]).sum().backward()
    model.zero_grad()
    before = resident_bytes()
    loss = model(x).sum()
    held = resident_bytes() - before
    loss.backward()
    # The inputs of the two linear layers, the sine's and the cosine's.
    return held, blocks * rows * size * 4 * (1 + 3 * 4), [param.grad for param in model.parameters()]


def test_the_disk_frees_memory(tmp_path: Path) -> None:
    """109 MB of 8 blocks: with the disk the last block (14 MB) and staging memory (8 MiB) stay."""
    ((without, saved, expected),) = pool(1).run(held_after_forward, False, str(tmp_path))
    ((with_disk, _, found),) = pool(1).run(held_after_forward, True, str(tmp_path))
    assert all(map(torch.equal, found, expected))
    assert without > 0.9 * saved, (without, saved)
    assert with_disk < 0.3 * saved, (with_disk, saved)
