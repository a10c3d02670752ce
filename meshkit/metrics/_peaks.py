"""Dense bf16 peaks of known devices, the denominator of MFU. An unknown device has none, and then there is no MFU."""

from __future__ import annotations

import re

import torch

# Name as torch.cuda.get_device_name() gives it -> dense bf16 FLOP/s with fp32 accumulation. Datasheets of NVIDIA print
# the figure with 2:4 sparsity, twice this. Names are matched whole, so that a laptop part, a MIG slice or an "RTX 4090
# D" does not get the peak of its larger sibling.
_PEAKS: tuple[tuple[str, float], ...] = (
    # H100 whitepaper: SXM5 989.4 dense, PCIe 756. H100 NVL datasheet: 1671 sparse.
    (r"NVIDIA H[18]00 80GB HBM3", 989.4e12),
    (r"NVIDIA H[18]00 PCIe", 756e12),
    (r"NVIDIA H100 NVL", 835.5e12),
    # H200 datasheet: SXM 1979 sparse, NVL 1671 sparse. GH200 datasheet: 1979 sparse.
    (r"NVIDIA H200", 989.4e12),
    (r"NVIDIA H200 NVL", 835.5e12),
    (r"NVIDIA GH200 \d+GB", 989.4e12),
    # Blackwell architecture brief: HGX B200 4.5 PFLOP/s sparse, GB200 5 PFLOP/s sparse per GPU.
    (r"NVIDIA B200", 2250e12),
    (r"NVIDIA GB200", 2500e12),
    # A100 datasheet: 312 dense in every form. A800 has the same cores and slower links.
    (r"NVIDIA A[18]00-SXM4-\d+GB", 312e12),
    (r"NVIDIA A[18]00-PCIE-\d+GB", 312e12),
    (r"NVIDIA A[18]00 80GB PCIe", 312e12),
    # Datasheets: A40 149.7 dense, A30 165 dense, A10 125 dense.
    (r"NVIDIA A40", 149.7e12),
    (r"NVIDIA A30", 165e12),
    (r"NVIDIA A10", 125e12),
    # Datasheets: L40S 733 sparse (362.05 dense), L40 362 sparse (181.05 dense), L4 242 sparse (121 dense).
    (r"NVIDIA L40S", 362.05e12),
    (r"NVIDIA L40", 181.05e12),
    (r"NVIDIA L4", 121e12),
    # Ada and GA102 whitepapers: "BF16 tensor with FP32 accumulate", dense, at the boost clock on the box.
    (r"NVIDIA GeForce RTX 4090", 165.2e12),
    (r"NVIDIA GeForce RTX 3090", 71e12),
    # AMD product pages: MI300X and MI325X 1307.4 dense; MI250X 383 for the card, which torch sees as two devices.
    (r"AMD Instinct MI300X( OAM)?", 1307.4e12),
    (r"AMD Instinct MI325X( OAM)?", 1307.4e12),
    (r"AMD Instinct MI250X", 191.5e12),
)


def peak_flops_of(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name its driver reports; None when the name is not in the table."""
    return next((peak for name, peak in _PEAKS if re.fullmatch(name, device_name)), None)


def peak_flops_per_s(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of this device; None for a CPU or an accelerator that is not in the table."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
