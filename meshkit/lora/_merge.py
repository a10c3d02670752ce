"""Merging LoRA adapters into the weights of their layers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshkit.core.model_state import full_model_of, set_full_model
from meshkit.core.quantized_weight import codes_of, decode_linear
from meshkit.core.sharding import full_tensor, local_slices, local_tensor
from meshkit.errors import PlanError
from meshkit.lora._adapter import A, B, adapted, is_adapter, lora_of, set_lora
from meshkit.parallel.data import after_inference


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Add scaling * B A to every adapted weight and remove the adapters, in place, on any mesh. Every rank must call it.

    The product is computed in fp32 at least and rounded once to the weight's dtype. Afterwards parameters have the names from
    before `lora` and stay frozen; the adapters' optimizer is useless. Merge in order to save or to infer.
    A quantized base is decoded to the adapters' dtype and the product added. This works only before `parallelize`: shards of
    codes cannot become shards of weights.
    Wire: an all-gather of each A and B. Raises: PlanError for a model without adapters, and for a base in few bits on a mesh.
    """
    lora = lora_of(model)
    if lora is None:
        raise PlanError("merge_lora: the model has no adapters.")
    if lora.base is not None:
        _decode_base(model)
    after_inference(model)  # frees gathered parameters: they would not see the change of the shards
    for _, layer in adapted(model):
        # A collective for each layer: every rank must call merge.
        up, down = full_tensor(layer._modules[B].weight), full_tensor(layer._modules[A].weight)
        _add_product(layer.weight, up, down, lora.scaling)
        del layer._modules[A], layer._modules[B]
    # With pp every rank has the names of all stages; those of adapters go, or a checkpoint would look for them.
    full_model = full_model_of(model)
    if full_model is not None:
        tensors = {name: tensor for name, tensor in full_model.tensors.items() if not is_adapter(name)}
        owners = {name: rank for name, rank in full_model.owners.items() if name in tensors}
        set_full_model(model, replace(full_model, tensors=tensors, owners=owners))
    set_lora(model, None)
    return model


def _decode_base(model: nn.Module) -> None:
    layers = [child for child in model.modules() if codes_of(child) is not None]
    sharded = any(isinstance(child, FSDPModule) for child in model.modules())
    if sharded or full_model_of(model) is not None or any(isinstance(layer.weight, DTensor) for layer in layers):
        raise PlanError(
            "merge_lora: the base is in few bits, and its shards cannot become those of whole numbers of a dtype. Write the "
            "adapters by mk.models.save_lora, and merge them in a plain model that reads them by mk.models.load_lora."
        )
    dtype = next(layer._modules[A].weight.dtype for _, layer in adapted(model))
    for layer in layers:
        assert isinstance(layer, nn.Linear)
        decode_linear(layer, dtype)


def _add_product(weight: Tensor, up: Tensor, down: Tensor, scaling: float) -> None:
    """This rank's part of weight [out, in] += scaling * up [out, r] down [r, in]."""
    rows, columns = local_slices(weight)
    local = local_tensor(weight)
    # One rounding at the end: in bf16 the sum of a rounded product would be rounded twice.
    dtype = torch.promote_types(torch.promote_types(weight.dtype, up.dtype), torch.float32)
    added = up[rows].to(dtype) @ down[:, columns].to(dtype)
    local.copy_(local.to(dtype) + added * scaling)
