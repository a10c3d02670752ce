"""Mixture of experts: routing and its auxiliary losses (load balancing, z-loss), which know no mesh."""

from .aux_loss import AuxiliaryLosses as AuxiliaryLosses
