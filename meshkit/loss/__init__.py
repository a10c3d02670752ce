"""From the output head to a number: cross-entropy and token log-probabilities, chunked and vocabulary-parallel."""

from ._cross_entropy import IGNORED as IGNORED
from ._cross_entropy import cross_entropy as cross_entropy
from ._cross_entropy import vocabulary_part as vocabulary_part
from ._divergence import Divergence as Divergence
from ._divergence import Teacher as Teacher
from ._divergence import token_divergences as token_divergences
from ._top_log_probs import top_log_probs as top_log_probs
from ._watch import LossWatch as LossWatch
from ._token_log_probs import TokenLogProbs as TokenLogProbs
from ._token_log_probs import log_sum_squares as log_sum_squares
from ._token_log_probs import token_log_probs as token_log_probs
from .linear_logits import LinearLogits as LinearLogits
