"""Flags of reinforcement learning: rollouts, losses, samplers, environments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshkit.algos.policy import CORRECTIONS, GAE, PRESETS, GroupAdvantage, PolicyLoss
from meshkit.errors import PlanError
from meshkit.models import config_from_pretrained
from meshkit.moe import RoutingReplay
from meshkit.recipes.flags._model import LoraFlags
from meshkit.recipes.flags._parallel import ParallelFlags
from meshkit.recipes.flags._run import LearnFlags, StepFlags
from meshkit.recipes.ranges import Count, CountOrNone, NotNegative, Positive, Share


@dataclass(frozen=True, kw_only=True)
class RolloutFlags(LearnFlags, LoraFlags):
    """Rollouts of reinforcement learning: prompts, the inference engine, and rewards."""

    seq_len: Count = 64
    """tokens of a row of supervised steps"""
    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder; default: a small model, trained here first"""
    task: Literal["addition", "reversal", "countdown"] = "addition"
    """without --data"""
    data: tuple[Path, ...] = ()
    """JSONL, Parquet or Arrow files with prompts and the fields that the reward reads; needs --pretrained"""
    held_out: Share = 0.05
    """part of the rows that is only evaluated on"""
    reward: tuple[str, ...] = ()
    """exact, arithmetic, countdown, unit-tests, or "file.py:function"; several are added up, with weights as exact=0.5;
    default: the task's, exact with --data"""
    reward_timeout_s: Positive = 10.0
    """of each answer"""
    reward_workers: CountOrNone = 0
    """processes that score a rank's answers at once; 0: the rank itself, one after the other"""
    fail_fast: bool = False
    """stop if an answer cannot be scored; otherwise such answers are left out, counted and shown"""
    prompts: Count = 32
    """of one step, over all ranks"""
    samples: Count = 16
    """answers to each"""
    temperature: NotNegative = 1.0
    max_new_tokens: Count | None = None
    """default: the task's, 256 with --data; with an overlong penalty (DAPO) a quarter more is written, at a cost"""
    engine: Literal["meshkit", "vllm"] = "meshkit"
    """inference engine that writes the answers; vllm, a separate install, has all weights on every rank, synced each step"""
    vllm_memory: Share = 0.3
    """the share of a GPU's memory that vllm may take"""
    sft_steps: CountOrNone | None = None
    """without --pretrained: steps on right answers before; default: the task's"""
    sft_lr: NotNegative | None = None
    """of those steps; default: the task's"""
    eval_prompts: Count = 512

    def refuse_adapters(self) -> None:
        """Raises: PlanError for adapters without a model, and for dropout, without which answers are written."""
        self.refuse_lora_of_nothing()
        if self.lora_dropout:
            raise PlanError(
                f"--lora-dropout {self.lora_dropout:g}: answers are written without, and learnt so. Leave it away."
            )


CorrectionName = Literal[
    "none", "tis", "mis", "icepop", "sequence-tis", "sequence-mis", "geometric", "off-policy", "dppo-tv", "dppo-kl"
]  # the names of CORRECTIONS, which a test compares


@dataclass(frozen=True, kw_only=True)
class PolicyFlags(StepFlags, RolloutFlags):
    """Policy gradients on rollouts."""

    microbatches: Count = 1
    """gradient accumulation: the number of microbatches is a multiple of this"""
    tokens_per_microbatch: Count = 16_384
    """token budget: answers are shared out over data ranks by tokens, in as few microbatches as keep to it; cp splits each"""
    preset: str = "GRPO"
    """a loss of meshkit.algos.policy; the recipe says which it can"""
    kl: NotNegative = 0.0
    """coefficient of the KL to the reference model, the policy before training, in place of the preset's; 0 needs none"""
    correction: tuple[CorrectionName, ...] = ()
    """factors for answers of older weights or another engine, in place of the preset's; several multiply; none: without"""

    routing_replay: RoutingReplay = "none"
    """of a policy with experts, which ones its updates use: none, what each chooses; old (R2), those of the policy before the
    step's updates; rollout (R3), those of the generator"""

    def describe_loss(self) -> str:
        """The preset by name, its KL where --kl says otherwise, and --correction."""
        coefficient = PRESETS[self.preset].kl.coefficient
        kl = "without its KL" if not self.kl else f"with a KL of {self.kl:g} in place"
        described = self.preset if coefficient == self.kl else f"{self.preset}, {kl} of {coefficient:g} (--kl)"
        return f"{described}, correction {' '.join(self.correction)}" if self.correction else described

    def policy_loss(self, *, critic: bool) -> PolicyLoss:
        """The preset, with --kl. critic: whether the recipe has one.

        Raises: PlanError for an unknown name, and for a loss that needs something that the recipe lacks.
        """
        # A loss with GAE reads values, which only a critic gives.
        has_critic = {name: isinstance(loss.advantage, GAE) for name, loss in PRESETS.items()}
        if critic and not has_critic.get(self.preset):
            fitting = ", ".join(name for name, has in has_critic.items() if has)
            raise PlanError(f"--preset {self.preset} is not a loss with a critic. Choose from {fitting}.")
        if self.preset not in PRESETS:
            raise PlanError(f"--preset {self.preset} is not known. Choose from {', '.join(PRESETS)}.")
        if has_critic[self.preset] and not critic:
            raise PlanError(f"--preset {self.preset} needs a critic, which this recipe has not. Choose another.")
        if self.routing_replay != "none":
            self._refuse_replay()
        loss = PRESETS[self.preset]
        if isinstance(loss.advantage, GroupAdvantage) and loss.advantage.baseline == "greedy":
            needs = "greedy answers as a baseline"
            raise PlanError(f"--preset {self.preset} needs {needs}, which this recipe has not. Choose another.")
        if self.correction:
            corrections = tuple(each for name in self.correction for each in CORRECTIONS[name])
            loss = dataclasses.replace(loss, corrections=corrections)
        elif getattr(self, "staleness", 0) and not loss.corrections:
            raise PlanError(
                f"--staleness {getattr(self, 'staleness', 0)} with --preset {self.preset}, which does not correct for the "
                "older policy that wrote the answers. Choose a --correction such as tis, or --staleness 0."
            )
        # In place of the preset's also if it is 0: a reference model is a second model in memory, which nobody gets
        # unasked.
        return dataclasses.replace(loss, kl=dataclasses.replace(loss.kl, coefficient=self.kl))

    def _refuse_replay(self) -> None:
        """Raises: PlanError for --routing-replay without experts, and where nobody records what the generator chose."""
        said = f"--routing-replay {self.routing_replay}"
        if self.pretrained is None or not hasattr(config_from_pretrained(self.pretrained), "router"):
            model = "the small model" if self.pretrained is None else f"{self.pretrained}"
            raise PlanError(
                f"{said}: {model} has no experts. Give --pretrained a mixture of experts, or leave it away."
            )
        if self.routing_replay == "rollout" and self.engine != "meshkit":
            raise PlanError(
                f"{said}: --engine {self.engine} does not tell what its routers chose. Use old, or --engine meshkit."
            )


@dataclass(frozen=True, kw_only=True)
class SamplerFlags(ParallelFlags):
    """Rollouts by a copy of the policy, the sampler, in a layout or on ranks of its own. --mesh is then the learners'."""

    sampler_mesh: str | None = None
    """mesh of the sampler, a copy of the actor that gets its weights by weight sync; default: the actor itself writes"""
    sampler_ranks: CountOrNone = 0
    """number of ranks, the last ones, that only the sampler uses; 0: it shares all ranks"""
    staleness: CountOrNone = 0
    """number of steps that the sampler runs ahead, with weights older by as many; with --stream, by at most as many"""
    stream: bool = False
    """the sampler, on --sampler-ranks of its own, writes without a stop; weights arrive between tokens"""
    stream_tokens: Count = 8
    """that it writes between two looks at what the learners do"""


@dataclass(frozen=True, kw_only=True)
class SampledFlags(PolicyFlags, SamplerFlags):
    """Policy gradients on rollouts of a sampler."""

    reference_mesh: str | None = None
    """mesh of the reference model of --kl; default: that of the learners"""
    reference_ranks: CountOrNone = 0
    """number of ranks, those before the sampler's own, that only the reference model uses; 0: it shares the learners'"""
    worker_port: CountOrNone | None = None
    """serve `python -m meshkit rollout-worker`s of other jobs at this port, which write the answers, and weights at the next
    one; 0 takes free ones"""
    worker_secret: Path | None = None
    """a file with the secret that workers know too"""
    worker_lease: Positive = 30.0
    """seconds after which a worker that is not heard of is lost, and what it wrote is given to others"""
    worker_verify: bool = False
    """learn what workers write after `python -m meshkit rollout-validator` has verified by its fingerprints that the right
    weights wrote it"""
    validator_secret: Path | None = None
    """a file with the secret of validators, which workers do not know"""

    @property
    def in_calls(self) -> bool:
        """Whether a step is a dataflow of calls: a model has a mesh of its own, or workers write."""
        return self.sampler_mesh is not None or self.reference_mesh is not None or self.worker_port is not None


@dataclass(frozen=True, kw_only=True)
class CriticFlags(SampledFlags):
    """Policy gradients with a critic, which learns beside the policy."""

    critic_lr: NotNegative = 1e-3
    """learning rate of the critic, constant"""
    critic_warmup: CountOrNone = 5
    """steps in which only the critic learns"""
    critic_mesh: str | None = None
    """mesh of the critic; default: that of the actor"""
    critic_ranks: CountOrNone = 0
    """number of ranks, those after the actor's, that only the critic uses; 0: it shares the actor's"""

    @property
    def in_calls(self) -> bool:
        return super().in_calls or self.critic_mesh is not None


@dataclass(frozen=True, kw_only=True)
class EnvironmentFlags(SampledFlags):
    """Environments, in which answers are turns of an episode."""

    task: Literal["addition", "reversal", "countdown", "calculator", "guessing"] = "addition"  # type: ignore[assignment]
    environment: str = ""
    """calculator, guessing, or "file.py:Class": its steps give the reward, and --max-new-tokens is of a turn; default: the
    task's, where it has one"""
    turns: Count | None = None
    """the most of an episode; default: the task's, 8 with --environment"""
    environment_workers: CountOrNone = 0
    """processes in which a rank's environments step, with --reward-timeout-s for each step; 0: the rank itself"""
    turn_groups: Count = 1
    """parts of the prompts that take turns: environments of one step while answers of another are written"""
