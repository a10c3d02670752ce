"""The training step on any mesh: gradient accumulation, loss normalisation over the whole step, gradient clipping."""

from meshkit.step._loss import Batch as Batch
from meshkit.step._loss import Count as Count
from meshkit.step._loss import Loss as Loss
from meshkit.step._loss import additive as additive
from meshkit.step._loss import count_labels as count_labels
from meshkit.step._loss import model_inputs as model_inputs
from meshkit.step._loss import next_token_loss as next_token_loss
from meshkit.step._norm import clip_grad_norm as clip_grad_norm
from meshkit.step._norm import grad_norm as grad_norm
from meshkit.step._norm import inner_product as inner_product
from meshkit.step._optimizers import compare_anew as compare_anew
from meshkit.step._optimizers import compare_optimizers as compare_optimizers
from meshkit.step._rows import refuse_microbatches as refuse_microbatches
from meshkit.step._rows import split_rows as split_rows
from meshkit.step._run import Movable as Movable
from meshkit.step._run import Run as Run
from meshkit.step._watch import StepWatch as StepWatch
