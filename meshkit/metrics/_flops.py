"""FLOPs per token of training a decoder, in the two conventions of papers, and peak FLOP/s of devices: what MFU needs.

A matmul parameter costs 2 FLOPs forward and 4 backward. Attention costs 4 * keys * heads * head_dim forward (scores and
values) and twice that backward. The conventions differ in `keys`, the number of keys a query is charged for:

| convention | keys, one document of n tokens | used by                                            |
|------------|--------------------------------|----------------------------------------------------|
| full       | n                              | PaLM (Chowdhery et al. 2022), torchtitan, nanotron |
| causal     | n / 2                          | Megatron-LM, MaxText                               |

Sparse attention is charged the most blocks that its choice can take, in both. Recompute is not counted in either: MFU, not
HFU. Neither are the input embedding, norms, biases and the softmax.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from meshkit.errors import MeshkitError
from meshkit.strategy import Sparse, visible_pairs

# The families whose block is q, k, v, o and a gated MLP of three matrices, or experts like it, and nothing else.
_KNOWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """Forward and backward FLOPs per token: `full` charges the whole square of attention, `causal` the masked part."""

    full: float
    causal: float


class DecoderConfig(Protocol):
    """A gated-MLP decoder under Hugging Face's names. Optional: head_dim, sliding_window, layer_types, model_type."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


def train_flops_per_token(
    *,
    matmul_params: int,
    layers: int = 0,
    q_heads: int = 0,
    head_dim: int = 0,
    lengths: int | Sequence[int],
    sliding_window: int | None = None,
    sparse: Sparse | None = None,
) -> FlopsPerToken:
    """FLOPs per token, forward and backward: 6 * matmul_params + 12 * layers * q_heads * head_dim * keys.

    matmul_params: weights of every matrix product, with the head and without the input embedding.
    lengths: tokens of a sequence, or of each document packed into one; `keys` is then the mean over tokens, so that n
    becomes sum(n^2) / sum(n). A window w < n charges w keys in the full convention and w - w^2 / 2n in the causal one.
    sparse: how blocks of keys are chosen; charges the blocks that queries see at most, in the causal convention as the mask
    cuts them. What one step chose, `watching_choices` of `meshkit.parallel.context` tells.
    Raises: MeshkitError for an empty document or window, and for a window beside sparse.
    """
    documents = [lengths] if isinstance(lengths, int) else list(lengths)
    if not documents or min(documents) < 1:
        raise MeshkitError(
            f"lengths={lengths!r}: FLOPs per token need documents of at least 1 token. "
            "Give the sequence length, or the length of each packed document."
        )
    if sliding_window is not None and sliding_window < 1:
        raise MeshkitError(f"sliding_window={sliding_window}: a window holds at least 1 token. Use None for no window.")
    if sparse is not None and sliding_window is not None:
        raise MeshkitError(
            f"sliding_window={sliding_window} and {sparse}: how many of the chosen blocks lie in the window is not known. "
            "Give one of them."
        )
    full = causal = 0.0
    for length in documents:
        if sparse is not None:
            blocks = -(-length // sparse.block)
            full += length * min(length, sparse.most_blocks(blocks) * sparse.block)
            causal += visible_pairs(sparse, length) - length / 2  # of the diagonal half, as everywhere here
            continue
        window = length if sliding_window is None else min(length, sliding_window)
        full += length * window
        causal += length * window - window**2 / 2  # the area under the mask: a triangle, then a band
    per_key = 12 * layers * q_heads * head_dim / sum(documents)
    return FlopsPerToken(full=6 * matmul_params + per_key * full, causal=6 * matmul_params + per_key * causal)


def document_lengths(position_ids: Tensor) -> list[int]:
    """Tokens of every document in a packed batch. position_ids: [B, T], 0 where a document starts; a row starts one."""
    starts = position_ids == 0
    # A row may begin in the middle of a document, whose earlier part it cannot attend to.
    starts[:, 0] = True
    bounds = [*starts.flatten().nonzero().flatten().tolist(), starts.numel()]
    return [end - start for start, end in pairwise(bounds)]


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What a model multiplies: enough to price a token at any sequence length.

    sliding_layers of the layers attend within sliding_window, the others to the whole document, or to blocks of it that are
    chosen (sparse). scans: FLOPs of a token in
    the forward of recurrent mixers besides their matrices, alike for every length of a document.
    note: what was left out of the count, empty if nothing was.
    """

    matmul_params: int
    layers: int = 0
    q_heads: int = 0
    head_dim: int = 0
    sliding_window: int | None = None
    sliding_layers: int = 0
    scans: int = 0
    sparse: Sparse | None = None
    note: str = ""

    @staticmethod
    def from_config(config: DecoderConfig, *, sparse: Sparse | None = None) -> ModelFlops:
        """Count a decoder from its configuration: Llama 2/3, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, or one like them.

        With experts, those that a token chooses count, and the router. sparse: of the run's `ContextPolicy`.
        Raises: MeshkitError for a family with other matrices (count the module instead) and for DeepSeek's experts.
        """
        family = getattr(config, "model_type", None)
        if family is not None and family not in _KNOWN_FAMILIES:
            raise MeshkitError(
                f"model_type={family!r}: only {', '.join(_KNOWN_FAMILIES)} are counted from their configuration. "
                "Use ModelFlops.from_module(model, layers=..., q_heads=..., head_dim=...)."
            )
        feed_forwards = _feed_forward_params(config)
        layers, heads, hidden = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        attention = 2 * hidden * heads * head_dim + 2 * hidden * config.num_key_value_heads * head_dim
        window = getattr(config, "sliding_window", None)
        one_kind = "full_attention" if window is None else "sliding_attention"
        kinds = getattr(config, "layer_types", None) or [one_kind] * layers
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise MeshkitError(
                f"layer_types has {unknown[0]!r}: only full_attention and sliding_attention are counted. "
                "Build ModelFlops(...) by hand."
            )
        return ModelFlops(
            matmul_params=layers * attention + feed_forwards + hidden * config.vocab_size,
            layers=layers,
            q_heads=heads,
            head_dim=head_dim,
            sliding_window=window,
            sliding_layers=kinds.count("sliding_attention") if window is not None else 0,
            sparse=sparse,
        )

    @staticmethod
    def from_module(
        module: nn.Module,
        *,
        layers: int = 0,
        q_heads: int = 0,
        head_dim: int = 0,
        sliding_window: int | None = None,
        sparse: Sparse | None = None,
    ) -> ModelFlops:
        """Count the `nn.Linear` weights of any module, also on meta or as DTensors; attention follows from the arguments.

        layers: those with attention. Recurrent mixers say themselves what their scan costs (`scan_flops`).
        A weight that two Linears share counts twice, for it is multiplied twice. `note` names what is not counted.
        """
        linears = [submodule for submodule in module.modules() if isinstance(submodule, nn.Linear)]
        # By id: a weight tied to an embedding or shared by two layers has several names.
        counted_ids = {id(submodule.weight) for submodule in linears}
        counted_ids |= {id(submodule.weight) for submodule in module.modules() if isinstance(submodule, nn.Embedding)}
        uncounted = [
            name for name, weight in module.named_parameters() if weight.ndim > 1 and id(weight) not in counted_ids
        ]
        notes = []
        if uncounted:
            more = f" and {len(uncounted) - 1} more" if len(uncounted) > 1 else ""
            notes.append(f"weights outside nn.Linear are not counted: {uncounted[0]}{more}")
        if not layers * q_heads * head_dim:
            notes.append("attention is not counted: give layers, q_heads and head_dim")
        return ModelFlops(
            matmul_params=sum(submodule.in_features * submodule.out_features for submodule in linears),
            layers=layers,
            q_heads=q_heads,
            head_dim=head_dim,
            sliding_window=sliding_window,
            sliding_layers=0 if sliding_window is None else layers,
            scans=sum(_scan_flops_of(submodule) for submodule in module.modules()),
            sparse=sparse,
            note="; ".join(notes),
        )

    def per_token(self, lengths: int | Sequence[int]) -> FlopsPerToken:
        """Training FLOPs per token for a sequence length, or for the lengths of packed documents."""
        shares = [
            train_flops_per_token(
                matmul_params=matmul_params,
                layers=layers,
                q_heads=self.q_heads,
                head_dim=self.head_dim,
                lengths=lengths,
                sliding_window=window,
                sparse=self.sparse,
            )
            for matmul_params, layers, window in (
                (self.matmul_params, self.layers - self.sliding_layers, None),
                # 0, since the products of all layers are charged in the first row.
                *([(0, self.sliding_layers, self.sliding_window)] if self.sliding_layers else ()),
            )
        ]
        scans = 3 * self.scans  # backward is twice the forward
        full, causal = (sum(each) for each in zip(*((share.full, share.causal) for share in shares), strict=True))
        return FlopsPerToken(full=full + scans, causal=causal + scans)


def _scan_flops_of(module: nn.Module) -> int:
    """FLOPs of a token in the forward of a recurrent mixer's scan, which the module says; 0 of any other module."""
    told = getattr(module, "scan_flops", 0)
    return told if isinstance(told, int) else 0


def _feed_forward_params(config: DecoderConfig) -> int:
    """Feed-forward parameters that a token is multiplied with, over all layers.

    Raises: MeshkitError for experts that are not counted.
    """
    layers, expert_layers = config.num_hidden_layers, 0
    width = config.intermediate_size
    in_expert_layer = 0
    for field in _EXPERT_FIELDS:
        if not (experts := getattr(config, field, None)):
            continue
        experts_per_token = getattr(config, "num_experts_per_tok", None)
        if experts_per_token is None or field == "n_routed_experts":
            raise MeshkitError(
                f"{field}={experts}: a token does not visit every expert, so this is no dense decoder. "
                "Build ModelFlops(matmul_params=<active parameters>, ...)."
            )
        sparse_step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
        expert_layers = sum((layer + 1) % sparse_step == 0 and layer not in dense for layer in range(layers))
        # The router's hidden × experts, and three matrices of each chosen expert; both times hidden_size below.
        in_expert_layer = experts + 3 * experts_per_token * (getattr(config, "moe_intermediate_size", None) or width)
    return config.hidden_size * (expert_layers * in_expert_layer + (layers - expert_layers) * 3 * width)


# Dense bf16 peaks of known devices, the denominator of MFU. An unknown device has none, and then there is no MFU.

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
