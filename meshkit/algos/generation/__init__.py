"""Answers of the model that trains, on its mesh and with its weights: cached, batched as they come, the same everywhere."""

from meshkit.algos.generation._cache import CachePolicy as CachePolicy
from meshkit.algos.generation._engine import Engine as Engine
from meshkit.algos.generation._generate import generate as generate
from meshkit.algos.generation._request import Completion as Completion
from meshkit.algos.generation._request import Prompt as Prompt
from meshkit.algos.generation._request import Sampling as Sampling
from meshkit.algos.generation._vllm import VllmEngine as VllmEngine
