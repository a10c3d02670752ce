"""Rollouts (generation, inference): answers of the model in training, on its mesh or by vLLM, with log-probabilities."""

from ._balanced import BalancedBatch as BalancedBatch
from ._balanced import answer_work as answer_work
from ._balanced import balance_examples as balance_examples
from ._cache import CachePolicy as CachePolicy
from ._engine import Engine as Engine
from ._engine import Sampling as Sampling
from ._fingerprints import top_entries as top_entries
from ._generate import generate as generate
from ._generation import Generation as Generation
from ._generation import has_paged_cache as has_paged_cache
from ._kept import KeptCache as KeptCache
from ._rollout import Prompt as Prompt
from ._rollout import Rollout as Rollout
from ._rollout import encode_prompts as encode_prompts
from ._token_values import REFERENCE as REFERENCE
from ._token_values import example_values as example_values
from ._token_values import label_log_probs as label_log_probs
from ._token_values import learnt as learnt
from ._token_values import model_logits as model_logits
from ._token_values import token_values as token_values
from ._verify import BOUNDS as BOUNDS
from ._verify import FingerprintBounds as FingerprintBounds
from ._verify import Verdict as Verdict
from ._verify import fingerprint_rollouts as fingerprint_rollouts
from ._verify import verify_rollouts as verify_rollouts
from ._vllm import VllmEngine as VllmEngine
