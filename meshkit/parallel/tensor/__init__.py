"""Tensor parallelism (TP) and sequence parallelism, as Megatron's, on one mesh axis, for any nn.Module."""

from .apply import tensor_parallel as tensor_parallel
from .layout import TensorLayout as TensorLayout
from .layout import tensor_layout as tensor_layout
