"""Models, and reading and writing them as Hugging Face folders."""

from meshkit.models.huggingface import config_from_pretrained as config_from_pretrained
from meshkit.models.huggingface import load_pretrained as load_pretrained
from meshkit.models.huggingface import save_config as save_config
from meshkit.models.huggingface import save_pretrained as save_pretrained
from meshkit.models.layers import LinearScaling as LinearScaling
from meshkit.models.layers import Llama3Scaling as Llama3Scaling
from meshkit.models.layers import Rope as Rope
from meshkit.models.layers import YarnScaling as YarnScaling
from meshkit.models.llama import Llama as Llama
from meshkit.models.llama import LlamaConfig as LlamaConfig
from meshkit.models.llama_plan import LLAMA_PLAN as LLAMA_PLAN
from meshkit.models.meta import meta_parameters as meta_parameters
from meshkit.models.presets import LLAMA2_7B as LLAMA2_7B
from meshkit.models.presets import LLAMA3_8B as LLAMA3_8B
from meshkit.models.presets import LLAMA3_70B as LLAMA3_70B
from meshkit.models.presets import LLAMA32_1B as LLAMA32_1B
from meshkit.models.presets import LLAMA32_3B as LLAMA32_3B
from meshkit.models.presets import MISTRAL_7B as MISTRAL_7B
from meshkit.models.presets import QWEN2_0_5B as QWEN2_0_5B
from meshkit.models.presets import QWEN2_7B as QWEN2_7B
from meshkit.models.presets import QWEN3_0_6B as QWEN3_0_6B
from meshkit.models.presets import QWEN3_8B as QWEN3_8B
