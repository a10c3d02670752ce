"""A device (GPU, accelerator, CPU) as data: peak FLOP/s, memory bandwidth, launch cost, and how near kernels come to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from meshkit.core.frozen_mapping import FrozenMapping
from meshkit.errors import ClusterError

Kernels = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a peak that large kernels reach, and the sizes at which a matrix product reaches half of that.

    matmul, attention: of the FLOP/s; attention_backward: of attention's in backward, which multiplies five times for two.
    memory: of the bandwidth. half_features: of the rows and columns of a product, half_depth: of the length that it sums
    over; each dim of n costs a factor n / (n + half). half_unaligned: added to the half of a dim of features that is no
    multiple of 16 bytes, which tensor cores load piece by piece. half_head: of attention's features per head. half_bytes: a
    kernel of the memory that reads and writes so many reaches half of the bandwidth.
    """

    matmul: float = 0.8
    attention: float = 0.6
    attention_backward: float = 0.8
    memory: float = 0.85
    half_features: float = 64.0
    half_depth: float = 128.0
    half_unaligned: float = 0.0
    half_head: float = 0.0
    half_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("matmul", "attention", "attention_backward", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ClusterError(
                    f"efficiency.{name}={getattr(self, name)!r}: a share of the peak, above 0 and at most 1."
                )
        for name in ("half_features", "half_depth", "half_unaligned", "half_head", "half_bytes"):
            if not getattr(self, name) >= 0:
                raise ClusterError(f"efficiency.{name}={getattr(self, name)!r}: a size, at least 0.")


@dataclass(frozen=True, kw_only=True)
class KernelCurve:
    """Measured seconds of matrix products of one dtype. points: (rows, columns, depth, seconds) of each."""

    dtype: str
    points: tuple[tuple[float, float, float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(tuple(map(float, point)) for point in self.points))
        if not self.points or any(len(point) != 4 or min(point) <= 0 for point in self.points):
            raise ClusterError(
                f"curve of {self.dtype}: points={self.points!r}: give [rows, columns, depth, seconds] of each, all above 0."
            )

    def slowed(self, speed: float) -> KernelCurve:
        return replace(self, points=tuple((*point[:3], point[3] / speed) for point in self.points))


@dataclass(frozen=True, kw_only=True)
class PowerPoint:
    """A clock of the device: the power it then draws, and how much longer a matrix product takes."""

    mhz: float
    watts: float
    slowdown: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Peaks are dense, with the accumulation that training uses.

    flops_per_s: by dtype, as {"bfloat16": 989.4e12}. launch_s: between two kernels that the host launches one by one; nothing
    of it is seen while the device is behind the host. blocking: the host waits for each kernel, as with
    CUDA_LAUNCH_BLOCKING=1, so all of it is seen. kernels: whose they are, "cuda" (of any GPU) or "cpu", which pays for each
    launch. context_bytes: what the driver takes of the memory; communicator_bytes: what NCCL's buffers take of it for
    each communicator. memory_curve: measured (bytes, seconds) of kernels that are bound by the memory, by bytes; it wins over
    bandwidth and efficiency. power: its clocks; idle_watts: what it draws while it waits.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float = 4e-6
    blocking: bool = False
    kernels: Kernels = "cuda"
    context_bytes: float = 0.0
    communicator_bytes: float = 0.0
    efficiency: Efficiency = field(default_factory=Efficiency)
    curves: tuple[KernelCurve, ...] = ()
    memory_curve: tuple[tuple[float, float], ...] = ()
    power: tuple[PowerPoint, ...] = ()
    idle_watts: float = 0.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ClusterError(f"device.{name}={getattr(self, name)!r}: an amount above 0.")
        for name in ("context_bytes", "communicator_bytes"):
            if not getattr(self, name) >= 0:
                raise ClusterError(f"device.{name}={getattr(self, name)!r}: an amount of at least 0.")
        if not self.launch_s >= 0:
            raise ClusterError(f"device.launch_s={self.launch_s!r}: seconds, at least 0.")
        if self.kernels not in get_args(Kernels):
            raise ClusterError(f"device.kernels={self.kernels!r}: choose cuda or cpu.")
        object.__setattr__(self, "memory_curve", tuple((float(size), float(s)) for size, s in self.memory_curve))
        sizes = [size for size, _ in self.memory_curve]
        if sizes != sorted(set(sizes)) or min((min(point) for point in self.memory_curve), default=1.0) <= 0:
            raise ClusterError(
                f"device.memory_curve={self.memory_curve!r}: give [bytes, seconds], all above 0, by growing bytes."
            )
        if self.idle_watts and not 0 <= self.idle_watts <= self.watts:
            raise ClusterError(
                f"device.idle_watts={self.idle_watts!r}: at least 0, and at most the {self.watts:g} W of device.power."
            )
        object.__setattr__(self, "flops_per_s", FrozenMapping(self.flops_per_s))
        if not self.flops_per_s or not all(peak > 0 for peak in self.flops_per_s.values()):
            raise ClusterError(
                f"device.flops_per_s={dict(self.flops_per_s)!r}: give the peak of each dtype, as bfloat16 = 989.4e12."
            )

    @property
    def watts(self) -> float:
        """While it computes, at its fastest clock; 0 where no `power` is given."""
        return min(self.power, key=lambda point: point.slowdown).watts if self.power else 0.0

    def slowed(self, speed: float) -> Device:
        """The same at so much of its speed, in all that it computes."""
        if speed == 1:
            return self
        return replace(
            self,
            memory_bytes_per_s=self.memory_bytes_per_s * speed,
            flops_per_s={dtype: peak * speed for dtype, peak in self.flops_per_s.items()},
            launch_s=self.launch_s / speed,
            curves=tuple(curve.slowed(speed) for curve in self.curves),
            memory_curve=tuple((size, seconds / speed) for size, seconds in self.memory_curve),
        )

    def joules(self, step_s: float, busy_s: float) -> float:
        """Of step_s seconds, in busy_s of which it computes."""
        return self.idle_watts * step_s + (self.watts - self.idle_watts) * busy_s

    def peak_flops_per_s(self, dtype: str) -> float:
        """Of float8_e4m3fn and its kin float8's, where a file has no other. Raises: ClusterError for a dtype without."""
        if dtype.startswith("float8") and dtype not in self.flops_per_s and "float8" in self.flops_per_s:
            dtype = "float8"
        if dtype not in self.flops_per_s:
            raise ClusterError(
                f"{self.name} has no peak for {dtype}, only for {', '.join(self.flops_per_s)}. Give "
                f"device.flops_per_s.{dtype} in the cluster's file, or compute in one of those."
            )
        return self.flops_per_s[dtype]
