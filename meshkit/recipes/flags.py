"""Configuration (command-line flags) of recipes, each flag documented here once; a `Config` inherits those it reads.

A recipe changes a default by naming the field again; tyro shows the text of this file with it. What flags mean together is a
method here, so that it is not decided in ten recipes: `parallel` makes the `Strategy` that `mk.parallelize` takes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Self

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshkit.algos.policy import CORRECTIONS, GAE, PRESETS, GroupAdvantage, PolicyLoss
from meshkit.data import Truncation, WrongBody
from meshkit.errors import DataError, PlanError
from meshkit.lora import attach
from meshkit.mesh import MeshSpec
from meshkit.models import config_from_pretrained
from meshkit.optim import lr_schedule
from meshkit.plan import Plan
from meshkit.strategy import (
    ActivationOffload,
    ChunkedLoss,
    MemoryPolicy,
    OptimizerOffload,
    OptimizerPolicy,
    PipelinePolicy,
    Precision,
    Strategy,
)

from .folders import refuse_folder
from .ranges import Count, CountOrNone, NotNegative, Positive, Ranged, Share, Threshold

# ------------------------------------------------------------------------------------------------ the run and its steps


@dataclass(frozen=True, kw_only=True)
class RunFlags(Ranged):
    """Files and clocks of a run: what `Session` reads."""

    out: Path = Path("runs/recipe")
    """checkpoints, logs, traces and the final model"""
    eval_every: Count = 50
    save_every: Count = 50
    keep: Count = 2
    """number of checkpoints to keep; older ones are deleted"""
    alert: str = ""
    """who is told of stalls, errors, lost and slow ranks: "file.py:function", or an address for a POST of JSON"""
    status_page: bool = False
    """write status.html in --out every five seconds: where each rank is, and whether it works or waits"""
    call_files: bool = False
    """write the last calls of each rank (collectives, messages) into --out/calls, at a report and at the end"""
    profile: bool = False
    """write a Chrome trace of three steps, and with pp one of the schedule beside its simulation"""
    gc_every: CountOrNone = 100
    """collect Python's garbage in every so many steps, in the same ones on all ranks, and never else; 0: when Python does"""
    fp32_precision: Literal["ieee", "tf32"] = "ieee"
    """of fp32 products on CUDA, such as a router's in backward: whole, or by TF32 with 10 bits of each factor"""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LearnFlags(RunFlags):
    """Size, learning rate and clipping of a training step."""

    seq_len: Count = 256
    """tokens of a row"""
    microbatches: Count = 1
    """gradient accumulation: the number of parts in which a rank runs its rows"""
    lr: NotNegative = 3e-3
    warmup_steps: CountOrNone = 15
    weight_decay: NotNegative = 0.1
    clip: Threshold = 1.0
    """gradient clipping: the largest norm of a step's gradients"""


@dataclass(frozen=True, kw_only=True)
class StepFlags(LearnFlags):
    """Number of training steps, and the learning rate schedule over them."""

    steps: Count = 160
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    max_skips: CountOrNone = 0
    """how many steps in a row may be skipped because gradients are not finite"""
    memory_every: CountOrNone = 0
    """keep a checkpoint in the memory of the hosts in every so many steps: a restarted job goes on from there; 0: never"""
    memory_copies: CountOrNone = 1
    """of what --memory-every keeps of each rank: on how many other hosts, which may be lost; none on a single host"""
    corruption_every: CountOrNone = 0
    """silent data corruption: compare weights and optimizer state in every so many steps; 0: never"""
    replay_every: CountOrNone = 0
    """with --corruption-every: run one microbatch again in every so many steps; 0: never"""

    def lr_schedule(self, optimizer: Optimizer) -> LambdaLR:
        """Warm-up, then --lr-kind, which ends at a tenth of --lr if it falls."""
        return lr_schedule(
            optimizer, kind=self.lr_kind, warmup_steps=self.warmup_steps, total_steps=self.steps, min_factor=0.1
        )


@dataclass(frozen=True, kw_only=True)
class TrainFlags(StepFlags):
    """Training steps on given data."""

    global_batch: Count = 16
    """sequences, or rows of packed examples, of one optimizer step, over all ranks"""
    move_at: CountOrNone = 0
    """go on with the strategy of --move-to after so many steps, also in a job that is started again there; 0: never"""
    move_to: Path | None = None
    """a TOML file with that Strategy; without a mesh the ranks keep theirs"""
    forecast: str = ""
    """say after some steps how long a forecast on this cluster says that they take: a datasheet's name, or a file"""
    replan: NotNegative = 0.0
    """with --forecast: where it is wrong by more than this share of the step, search for the best strategy on the cluster as
    it was measured, and go on with that if it is faster; 0: never"""

    def move_strategy(self) -> Strategy | None:
        """Of --move-to; None without. Raises: PlanError for one flag without the other, and for what the loop says itself."""
        if self.replan and (not self.forecast or self.move_at):
            what = f"--move-at {self.move_at}" if self.move_at else "no --forecast"
            raise PlanError(
                f"--replan {self.replan} with {what}. Give a cluster's --forecast, and leave --move-at out."
            )
        if self.move_to is None and not self.move_at:
            return None
        if self.move_to is None or not 0 < self.move_at < self.steps:
            to = "no --move-to" if self.move_to is None else f"--move-to {self.move_to}"
            raise PlanError(
                f"--move-at {self.move_at} with {to} and --steps {self.steps}. Give a step from 1 to {self.steps - 1}, and a "
                "file with the Strategy that follows."
            )
        strategy = Strategy.read(self.move_to)
        if strategy.microbatches not in (None, self.microbatches):
            raise PlanError(
                f"--move-to {self.move_to} has microbatches={strategy.microbatches}, and the loop runs "
                f"--microbatches {self.microbatches} in every step. Leave them out of the file."
            )
        return strategy


# ------------------------------------------------------------------------------------------------ the model on its mesh


STRATEGY_FIELDS = {
    "mesh": "mesh",
    "zero": "zero",
    "sequence": "sequence",
    "schedule": "pipeline.schedule",
    "recompute": "memory.recompute",
    "loss_chunk": "memory.loss",
    "offload": "memory.offload",
    "precision": "memory.precision",
    "optimizer_offload": "memory.optimizer.offload",
    "adam_states": "memory.optimizer.states",
    "compile": "compile",
    "microbatches": "microbatches",
}
"""flag: the field of a `Strategy` that it sets"""


@dataclass(frozen=True, kw_only=True)
class ParallelFlags(Ranged):
    """Parallelism and memory of a model: the choices of `mk.parallelize`."""

    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_replicate=2 dp_shard=2 tp=2 cp=2", with experts "ep=4 etp=2"; -1 is the ranks that are left"""
    zero: Literal[1, 2, 3] | None = None
    """sharding over dp_shard; default 3, with pp 1"""
    sequence: bool = True
    """with tp: shard activations along the sequence between regions"""
    schedule: str = "1f1b"
    """with pp: a name of `python -m meshkit draw`, or a CSV file with a table of yours"""
    recompute: Literal["none", "activation", "selective", "full"] = "none"
    """activation checkpointing: how much blocks compute again in backward"""
    loss_chunk: Count | None = None
    """chunked cross-entropy: tokens whose logits exist at a time; default: all of them"""
    offload: Literal["none", "host", "disk"] = "none"
    """activation offload: where the activations that backward needs are kept, if not on the device"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 is mixed precision: it computes in bf16, with fp32 master weights"""
    optimizer_offload: bool = False
    """master weights and optimizer state are kept and updated on the host"""
    adam_states: Literal["fp32", "8bit", "4bit", "fp8"] = "fp32"
    """how Adam's moments are stored"""
    compile: bool = False
    """torch.compile, block by block"""
    strategy: Path | None = None
    """a TOML file with a Strategy, in place of the flags above; one of those beside it may not say otherwise"""

    @classmethod
    def parse(cls, args: Sequence[str] | None = None, **options: Any) -> Self:
        """The flags of the command line, by tyro; with --strategy, `mesh` and `microbatches` are those of the file.

        args: default those of the process. options: of `tyro.cli`.
        Raises: PlanError for a flag that is given beside --strategy and says otherwise than the file, also if what it says
        is the flag's default; DataError for a warm-up that is longer than the run, and for an --out or
        --cache where no folder can be. A number outside of its range ends the process with 2, as what tyro cannot read.
        """
        import tyro  # of the extra `recipes`; without it a Config can still be made by keyword

        config: Self = tyro.cli(cls, args=args, **options)
        if isinstance(config, StepFlags) and config.warmup_steps > config.steps:
            # Now, and not when the schedule is made, which in some recipes is minutes later.
            raise DataError(
                f"--warmup-steps {config.warmup_steps} does not fit into --steps {config.steps}. Give 0 to {config.steps}."
            )
        for flag in ("out", "cache"):
            if flag in vars(config):
                refuse_folder(flag, getattr(config, flag))
        if config.strategy is None:
            return config
        # tyro says what a flag holds, not whether it was given: a default that was typed must be refused beside the file,
        # too.
        words = [word for word in (sys.argv[1:] if args is None else args) if word.startswith("--")]
        # Both spellings of a bool: --sequence and --no-sequence.
        names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
        chosen = config._read_strategy(names | {name.removeprefix("no_") for name in names})
        # The fields that recipes read themselves, besides `parallel`: they must not go on saying the default.
        values: dict[str, Any] = {"zero": chosen.zero, "sequence": chosen.sequence, "compile": chosen.compile}
        if isinstance(chosen.mesh, MeshSpec):
            values["mesh"] = _axes(chosen.mesh)
        if chosen.microbatches is not None and "microbatches" in vars(config):
            values["microbatches"] = chosen.microbatches
        return dataclasses.replace(config, **values)

    def parallel(self, **choices: Any) -> Strategy:
        """What `mk.parallelize` takes: these flags or the file of --strategy, and `choices` that no flag makes, as the plan.

        Raises: PlanError for a flag or one of `choices` that says otherwise than the file.
        """
        if self.strategy is None:
            return dataclasses.replace(self._of_flags(), **choices)
        # Without a command line, as in a Config made by keyword: what differs from its default was meant.
        changed = {each.name for each in dataclasses.fields(self) if getattr(self, each.name) != each.default}
        chosen = self._read_strategy(changed)
        for name, choice in choices.items():
            if name in chosen.changes and getattr(chosen, name) != choice:
                raise PlanError(
                    f"--strategy {self.strategy} chooses {name}, and so does this recipe, otherwise: "
                    f"{getattr(chosen, name)} and {choice}. Leave {name} out of the file."
                )
        return dataclasses.replace(chosen, **choices)

    def _of_flags(self) -> Strategy:
        return Strategy(
            memory=MemoryPolicy(
                recompute=self.recompute,
                offload=ActivationOffload(to=self.offload) if self.offload != "none" else None,
                loss=ChunkedLoss(tokens=self.loss_chunk) if self.loss_chunk is not None else None,
                precision=Precision() if self.precision == "bf16" else None,
                optimizer=OptimizerPolicy(
                    states=self.adam_states, offload=OptimizerOffload() if self.optimizer_offload else None
                ),
            ),
            zero=self.zero,
            sequence=self.sequence,
            pipeline=PipelinePolicy(schedule=self.schedule),
            compile=self.compile,
        )

    def _read_strategy(self, given: AbstractSet[str]) -> Strategy:
        """The file's. Raises: PlanError for a flag of `given` that says otherwise; mesh and microbatches may be left open."""
        assert self.strategy is not None
        chosen = Strategy.read(self.strategy)
        flags = dataclasses.replace(self._of_flags(), mesh=self.mesh, microbatches=getattr(self, "microbatches", None))
        for flag, field in STRATEGY_FIELDS.items():
            by_file, by_flag = attrgetter(field)(chosen), attrgetter(field)(flags)
            # None in the file is no choice: the flag, or its default, fills it.
            is_open = by_file is None and flag in ("mesh", "microbatches")
            if flag in given and not is_open and by_file != by_flag:
                raise PlanError(
                    f"--{flag.replace('_', '-')} makes {field} {_shown(by_flag)}, but in --strategy {self.strategy} it is "
                    f"{_shown(by_file)}: two places for one choice. Leave the flag away, or change the file."
                )
        return chosen


def _axes(spec: MeshSpec) -> str:
    """As --mesh says it. Of one rank: an axis all the same, for an empty mesh takes all ranks there are."""
    return " ".join(f"{axis}={size}" for axis, size in vars(spec).items() if size != 1) or "dp_shard=1"


def _shown(choice: Any) -> str:
    return f'"{_axes(choice)}"' if isinstance(choice, MeshSpec) else repr(choice)


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Ranged):
    """The weights and the shape that a model begins with."""

    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder; default: a small model, from nothing"""

    def shape(self, default: Any, vocab_size: int | None = None) -> Any:
        """The configuration of the model: of --pretrained as it is, of the default with the tokenizer's vocabulary."""
        # A folder's vocabulary is not changed: its embedding may be padded beyond the tokenizer's.
        if self.pretrained is not None:
            return config_from_pretrained(self.pretrained)
        return dataclasses.replace(default, vocab_size=vocab_size or default.vocab_size)


@dataclass(frozen=True, kw_only=True)
class LoraFlags(ModelFlags):
    """Adapters (LoRA, QLoRA) instead of all weights."""

    lora_rank: Count | None = None
    """train adapters of this rank on a frozen model, and write them alone, as a folder of PEFT's"""
    lora_alpha: Positive | None = None
    """default: twice the rank"""
    lora_dropout: Share = 0.0
    """of the adapters' inputs"""
    lora_base: Literal["nf4", "int8"] | None = None
    """QLoRA: hold the frozen weights in 4 or 8 bits"""

    def adapted(self, model: nn.Module, plan: Plan, *, seed: int) -> Plan:
        """Give the model its adapters, in place, and return the plan of both; without --lora-rank nothing changes."""
        if self.lora_rank is None:
            return plan
        options: dict[str, Any] = {"dropout": self.lora_dropout, "base": self.lora_base, "seed": seed}
        # alpha / rank scales the update: twice the rank makes it 2 at any rank.
        return attach(model, plan, rank=self.lora_rank, alpha=self.lora_alpha or 2.0 * self.lora_rank, **options)

    def refuse_lora_without_rank(self) -> None:
        """Raises: PlanError for flags of adapters without --lora-rank."""
        if self.lora_rank is None and (self.lora_base or self.lora_dropout):
            raise PlanError("lora_base and lora_dropout are of adapters, and there are none without lora_rank.")


# ------------------------------------------------------------------------------------------------ the data


@dataclass(frozen=True, kw_only=True)
class TextFlags(ModelFlags):
    """Text for a language model, and its evaluation on held-out text."""

    data: tuple[str, ...] = ()
    """text, JSONL or Parquet files, folders or patterns; empty: Python's standard library"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json; default: that of --pretrained, or one trained on the data, once"""
    cache: Path = Path("~/.cache/meshkit")
    """tokenizers and tokens made from the data"""
    eval_batches: Count = 8


@dataclass(frozen=True, kw_only=True)
class PretrainFlags(TextFlags):
    """Pretraining on short documents, and a sample of generated text at the end."""

    documents: bool = True
    """attention and positions stop at the end of a document"""
    explain: bool = False
    """print what each rank holds and sends, by mk.explain"""
    prompt: str = "import os\n\n\ndef "
    """of the sample"""
    sample_tokens: Count = 80


@dataclass(frozen=True, kw_only=True)
class InstructionFlags(ModelFlags):
    """Supervised fine-tuning (SFT): chats and instructions, whose answers are learnt."""

    data: tuple[str, ...] = ()
    """JSONL or Parquet files, or folders of `datasets`; empty: Python's standard library"""
    eval_data: tuple[str, ...] = ()
    """rows that are only evaluated on; empty: a part of --data"""
    held_out: Share = 0.1
    """that part"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json and a chat template; default: that of --pretrained, or one trained on the data"""
    turns: Literal["all", "last"] = "all"
    """which answers of a chat are learnt"""
    end_of_turn: Literal["template", "learn", "ignore"] = "template"
    """whether the token that ends an answer is learnt; "template": as the chat template marks it"""
    truncate: Truncation = "drop"
    """how to treat rows longer than seq_len"""
    allow: tuple[str, ...] = ()
    """problems of the data to accept, by the names that the error gives them"""


@dataclass(frozen=True, kw_only=True)
class PairFlags(ModelFlags):
    """Preferences: a prompt, a chosen and a rejected answer."""

    data: tuple[Path, ...] = ()
    """JSONL, Parquet or Arrow files, or folders of them; empty: functions of Python's standard library"""
    split: str | None = None
    """which split of a saved data set with several"""
    held_out: Share = 0.1
    """part of the rows that is only evaluated on"""
    tokenizer: Path | None = None
    """folder with a tokenizer and, for messages, its chat template; default: --pretrained's, or one trained here, once"""
    kinds: tuple[WrongBody, ...] = ("scrambled", "reversed", "repeated")
    """without --data: how bodies are made wrong; mismatched is the body of another function"""
    limit_bytes: Count = 400
    """without --data: longer functions are left out"""
    truncate: Truncation = "drop"
    """how to treat a pair longer than seq_len"""
    cache: Path = Path("~/.cache/meshkit")
    """the tokenizer made from the data"""


@dataclass(frozen=True, kw_only=True)
class RolloutFlags(LearnFlags, ModelFlags):
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
