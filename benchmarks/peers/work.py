"""The work that is the same for everyone: sizes, first weights, data, optimizer, and who has which rows."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import meshkit as mk
from benchmarks.peers.turns import Turns
from meshkit.data import REFERENCE_ALPHABET, Record, Tokenizer, addition_tasks, character_tokenizer
from meshkit.data._cursor import permute
from meshkit.data.examples import Example, Pair, Unit
from meshkit.models.huggingface.folder import config_to_dict

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
DPO_BETA = 0.1
TOL_LOSS_BF16 = 1e-2  # kernels round at different places
RL_LEARNING_RATE = 1e-6  # as large models have it: lengths stay those that the first weights write

_SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rope": mk.models.Rope(theta=500_000.0),
}
TINY = mk.models.LlamaConfig(**_SIZES)  # 5.8 million parameters
LARGER = mk.models.LlamaConfig(  # 39.9 million parameters
    **_SIZES
    | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "head_dim": 64}
)
MOE = mk.models.Qwen3MoeConfig(
    **_SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """rows: of the global batch."""

    config: mk.models.LlamaConfig
    rows: int
    tokens: int


PRESETS = {
    "tiny": Preset(config=TINY, rows=8, tokens=256),
    "1b": Preset(config=mk.models.LLAMA32_1B, rows=2, tokens=4096),
    "8b-cut": Preset(config=mk.models.LLAMA3_8B, rows=2, tokens=4096),  # as many layers as fit
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Steps of next-token training. rows: of the global batch. schedule, stages: of pp, with a
    microbatch for each row and so many layers in each stage."""

    mesh: str
    config: mk.models.LlamaConfig = TINY
    rows: int = 8
    tokens: int = 256
    zero: int = 3
    sequence: bool = False
    schedule: str = "1f1b"
    stages: tuple[int, ...] | None = None
    bf16: bool = False
    compile: bool = False
    device_type: str = "cpu"

    @property
    def spec(self) -> mk.MeshSpec:
        return mk.MeshSpec.parse(self.mesh)

    @property
    def microbatches(self) -> int:
        spec = self.spec
        return self.rows // (spec.dp_replicate * spec.dp_shard) if spec.pp > 1 else 1


@dataclass(frozen=True, kw_only=True)
class PostTraining:
    """SFT or DPO on examples of unequal lengths. samples: examples or pairs of a global batch."""

    mesh: str = "dp_replicate=2"  # as DDP has it
    config: mk.models.LlamaConfig = TINY
    samples: int = 16
    longest: int = 256
    all_steps: int = 64

    @property
    def spec(self) -> mk.MeshSpec:
        return mk.MeshSpec.parse(self.mesh)


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Steps of GRPO on sums to add. All answers are as long as they may be: nobody gains by what lengths differ."""

    mesh: str = "dp_replicate=2"  # as DDP has it
    prompts: int = 8
    samples: int = 8
    new_tokens: int = 16
    digits: int = 8
    all_steps: int = 64

    @property
    def spec(self) -> mk.MeshSpec:
        return mk.MeshSpec.parse(self.mesh)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Greedy answers to random prompts. ends: ids that end an answer; without any all have one length."""

    mesh: str = "dp_shard=1"
    config: mk.models.LlamaConfig = TINY
    prompts: int
    prompt_tokens: int = 48
    new_tokens: int = 64
    ends: int = 0

    @property
    def spec(self) -> mk.MeshSpec:
        return mk.MeshSpec.parse(self.mesh)

    @property
    def end_ids(self) -> tuple[int, ...]:
        draw = np.random.default_rng(0)
        return tuple(draw.choice(self.config.vocab_size, self.ends, replace=False).tolist())

    def prompts_of(self, step: int) -> list[np.ndarray]:
        """Of unequal lengths if answers are: the shortest has half of the longest's tokens."""
        draw, shortest = np.random.default_rng(step), self.prompt_tokens // (2 if self.ends else 1)
        lengths = np.linspace(self.prompt_tokens, shortest, self.prompts).astype(int)
        return [draw.integers(0, self.config.vocab_size, length) for length in lengths]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Parameters and AdamW's moments, half a gigabyte, on or from a disk."""

    mesh: str = "dp_shard=2"
    config: mk.models.LlamaConfig = LARGER

    @property
    def spec(self) -> mk.MeshSpec:
        return mk.MeshSpec.parse(self.mesh)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A step is an epoch: all rows of a file of tokens once, in an order drawn anew."""

    mesh: str = "dp_shard=1"
    file_tokens: int = 1 << 21
    tokens: int = 1024
    rows: int = 8

    @property
    def spec(self) -> mk.MeshSpec:
        return mk.MeshSpec.parse(self.mesh)

    @property
    def ids(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 2048, self.file_tokens + 1, dtype=np.uint16)


Work = Training | PostTraining | Rollouts | Answers | Saving | Reading

# input_ids and labels of this rank, both [rows of this rank, tokens] -> mean loss over all ranks, detached
Step = Callable[[Tensor, Tensor], Tensor]


def repeat(step: Step, work: Training, turns: Turns) -> None:
    """Steps until the last turn has been. Raises: Leave."""
    for index in count():
        turns.end_step(step(*rows_of_rank(index, work, turns.device)))


def rows_of_rank(step: int, work: Training, device: torch.device) -> tuple[Tensor, Tensor]:
    """(input_ids, labels) of one step. Ranks that differ in pp, cp or tp alone read the same rows."""
    spec = work.spec
    ranks = spec.dp_replicate * spec.dp_shard
    data_rank = dist.get_rank() // (spec.cp * spec.tp) % ranks
    # Of few ids, so that there is something to learn and a wrong gradient shows in the losses.
    ids = torch.randint(0, 256, (work.rows, work.tokens + 1), generator=torch.Generator().manual_seed(step))
    ids_of_rank = ids.chunk(ranks)[data_rank].to(device)
    return ids_of_rank[:, :-1].contiguous(), ids_of_rank[:, 1:].contiguous()


def transformers_model(work: Training) -> PreTrainedModel:
    """The same fp32 values in every process: drawn on the device from one seed."""
    return transformers_decoder(work.config, work.device_type)


def transformers_decoder(
    config: mk.models.LlamaConfig, device_type: str = "cpu", *, use_cache: bool = False, spread: float = 0.02
) -> PreTrainedModel:
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}
    # pad_token_id would zero the gradient of a row of the embedding.
    options = {**config_to_dict(config), "use_cache": use_cache, "pad_token_id": None, "initializer_range": spread}
    of_config, of_model = kinds[options["model_type"]]
    torch.manual_seed(0)
    with torch.device(device_type):
        return of_model(of_config.from_dict(options)).train()


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
    ]


def mean_over_ranks(loss: Tensor) -> Tensor:
    """Of ranks with equally many tokens."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def checksum(values: Iterable[Tensor]) -> Tensor:
    """The sum over all ranks of what each has, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        total += local_part(value.detach()).double().sum()
    dist.all_reduce(total)
    return total


def poison(values: Iterable[Tensor]) -> None:
    """What is not read stays wrong."""
    with torch.no_grad():
        for value in values:
            local_part(value).fill_(float("nan"))


def ids_of_one_step(work: Saving) -> Tensor:
    return torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(dist.get_rank()))


def local_part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def digest_of(answers: Sequence[np.ndarray]) -> Tensor:
    """A number that is another one for other ids."""
    return torch.tensor(
        float(zlib.crc32(b"".join(np.asarray(ids, dtype="<i8").tobytes() for ids in answers))), dtype=torch.float64
    )


# ------------------------------------------------------------------------------------------- data of post-training


def tokenizer_of(work: PostTraining | Rollouts) -> Tokenizer:
    return character_tokenizer(REFERENCE_ALPHABET)


def units_of(work: PostTraining, *, pairs: bool) -> list[Unit]:
    """Examples, or pairs of them, of 16 to `longest` tokens, of which the first third is a prompt."""
    draw = np.random.default_rng(0)

    def example(prompt: np.ndarray, length: int) -> Example:
        ids = np.concatenate((prompt, draw.integers(0, 256, length)))
        return Example(ids=ids.astype(np.int64), learn=np.arange(len(ids)) >= len(prompt))

    units: list[Unit] = []
    for length in draw.integers(16, work.longest, work.samples * work.all_steps):
        prompt = draw.integers(0, 256, int(length) // 3)
        rest = int(length) - len(prompt)
        chosen = example(prompt, rest)
        units.append(Pair(chosen, example(prompt, max(1, rest // 2))) if pairs else chosen)
    return units


def steps_of(work: PostTraining, units: Sequence[Unit]) -> list[list[Unit]]:
    """What `ExampleLoader` takes in each step."""
    order = [permute(index, len(units), seed=0, epoch=0) for index in range(len(units))]
    return [
        [units[index] for index in order[first : first + work.samples]] for first in range(0, len(order), work.samples)
    ]


def config_of_sums(tokenizer: Tokenizer) -> mk.models.LlamaConfig:
    return dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size)


def sums_to_add(work: Rollouts) -> list[Record]:
    return addition_tasks(digits=work.digits).train[: work.prompts * work.all_steps]


def reward(text: str, gold: str) -> float:
    """The part of the answer's characters that stand where they should."""
    return sum(symbol == right for symbol, right in zip(text, gold, strict=False)) / max(len(text), len(gold))
