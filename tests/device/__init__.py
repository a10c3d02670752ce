"""The device `late` (see late.cpp), an accelerator on the host: built once from this folder, loaded by `load`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("late.cpp")
BUILT = Path(__file__).parents[2] / "build" / "device"
COMPILER = os.environ.get("CXX", "g++")


def build() -> Path:
    """Compile, if neither this source nor this torch was compiled before: some 25 s of one core."""
    what = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    library = BUILT / f"late-{what}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(BUILT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest come at the same time
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    unfinished = library.with_suffix(".part")
    command = [
        *(COMPILER, "-O1", "-std=c++20", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(unfinished)),
        *(
            "-DTORCH_EXTENSION_NAME=late",
            "-DUSE_DISTRIBUTED",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        *(f"-I{path}" for path in include),
        *(f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    unfinished.rename(library)


@cache
def load() -> Any:
    """The device's own functions: `configure`, `races`, `counts`. Afterwards torch.device("late") is the accelerator."""
    spec = importlib.util.spec_from_file_location("late", build())
    assert spec is not None and spec.loader is not None
    late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    torch.utils.rename_privateuse1_backend("late")
    torch.late = sys.modules["torch.late"] = _module(late)  # type: ignore[attr-defined]  # where torch looks for it
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("late", _group(late), devices=["late"])
    return late


def _group(late: Any) -> Any:
    # torch asks every backend for it, and has it in Python alone.
    late.Group._set_default_timeout = lambda self, timeout: self.set_timeout(timeout)

    def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return late.Group(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    return group


def _module(late: Any) -> ModuleType:
    """torch.late, as FSDP2 and DTensor expect of a device."""
    module = ModuleType("torch.late")
    accelerator = torch.accelerator

    def generator(device: Any = None) -> torch.Generator:
        return late.default_generator(accelerator.current_device_index())

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: late.DEVICES,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "current_stream": accelerator.current_stream,
        "set_stream": accelerator.set_stream,
        "synchronize": accelerator.synchronize,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "device": torch.device,
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": lambda seed: generator().manual_seed(seed),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in members.items():
        setattr(module, name, value)
    return module
