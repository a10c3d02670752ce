"""Mixture of experts (MoE): routing and its auxiliary losses (load balancing, z-loss). Nothing here knows a mesh."""

from .aux_loss import AuxiliaryLosses as AuxiliaryLosses
