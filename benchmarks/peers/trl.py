"""The steps of TRL's own trainers, set as their users would set them for speed on a CPU.

What is not TRL's default, and why:
- fp32 on the CPU (`bf16=False, use_cpu=True`), no gradient checkpointing, fused AdamW, nothing saved or reported;
- examples are given as ids in an order that is fixed, so that the steps are those of the other loop;
- rows of a step in microbatches of `rows`: without packing the fewer rows, the less padding.
Their metrics (entropy, accuracy, rewards) are computed in every microbatch, and cannot be turned off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainerControl, TrainerState
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.peers.turns import Turns
from benchmarks.peers.work import (
    BETAS,
    DPO_BETA,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    RL_LEARNING_RATE,
    WEIGHT_DECAY,
    PostTraining,
    Rollouts,
    config_of_sums,
    reward,
    steps_of,
    sums_to_add,
    tokenizer_of,
    transformers_decoder,
    units_of,
)
from meshkit.data import Record, Tokenizer
from meshkit.data.examples import Example, Unit, members

datasets.disable_progress_bars()
ROWS = 1  # examples of a rank in a microbatch of SFT and DPO: those of unequal lengths need no padding


def sft(work: PostTraining, turns: Turns) -> None:
    steps = [[[unit] for unit in step] for step in steps_of(work, units_of(work, pairs=False))]
    train_sft(transformers_decoder(work.config), steps, tokenizer_of(work), turns, rows=ROWS)


def dpo(work: PostTraining, turns: Turns) -> None:
    train_dpo(
        transformers_decoder(work.config),
        transformers_decoder(work.config).eval(),
        steps_of(work, units_of(work, pairs=True)),
        tokenizer_of(work),
        turns,
        rows=ROWS,
        beta=DPO_BETA,
        precomputed=False,
    )


def grpo(work: Rollouts, turns: Turns) -> None:
    tokenizer = tokenizer_of(work)
    train_grpo(
        transformers_decoder(config_of_sums(tokenizer), use_cache=True),
        sums_to_add(work),
        reward,
        tokenizer,
        turns,
        prompts=work.prompts,
        samples=work.samples,
        max_new_tokens=work.new_tokens,
        min_new_tokens=work.new_tokens,
        learning_rate=RL_LEARNING_RATE,
    )


def train_sft(
    model: LlamaForCausalLM,
    steps: Sequence[Sequence[Sequence[Example]]],
    tokenizer: Tokenizer,
    turns: Turns,
    *,
    rows: int,
) -> None:
    """steps: of each its rows, of each the examples packed into it; without packing one. All steps have as many rows."""
    packed = any(len(row) > 1 for step in steps for row in step)
    samples = [_sft_sample(row, packed) for step in steps for row in step]

    class Trainer(SFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return losses.note(super().training_step(*args, **kwargs))

    losses = _Steps(turns)
    with _arguments(len(steps), len(steps[0]), rows) as arguments:
        trainer = Trainer(
            model,
            args=SFTConfig(
                **arguments,
                max_length=max(len(sample["input_ids"]) for sample in samples),
                packing=packed,
                dataset_kwargs={"skip_prepare_dataset": True},  # the rows are packed
            ),
            train_dataset=datasets.Dataset.from_list(samples),
            processing_class=tokenizer_of_transformers(tokenizer),
            callbacks=[losses],
        )
        _train(trainer)


def train_dpo(
    model: LlamaForCausalLM,
    reference: LlamaForCausalLM,
    steps: Sequence[Sequence[Unit]],
    tokenizer: Tokenizer,
    turns: Turns,
    *,
    rows: int,
    beta: float,
    precomputed: bool,
) -> None:
    """steps: of each its pairs, the same number in all. precomputed: the reference runs once, before the first step."""
    samples = [_dpo_sample(pair) for step in steps for pair in step]

    class Trainer(DPOTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return losses.note(super().training_step(*args, **kwargs))

        def _prepare_dataset(self, dataset: datasets.Dataset, *args: Any, **kwargs: Any) -> datasets.Dataset:
            return dataset  # has ids: encoding prompt and answer together would give others where they meet

    losses = _Steps(turns)
    with _arguments(len(steps), len(steps[0]), rows) as arguments:
        trainer = Trainer(
            model,
            ref_model=reference,
            args=DPOConfig(**arguments, beta=beta, max_length=None, precompute_ref_log_probs=precomputed),
            train_dataset=datasets.Dataset.from_list(samples),
            processing_class=tokenizer_of_transformers(tokenizer),
            callbacks=[losses],
        )
        _train(trainer)


def train_grpo(
    model: LlamaForCausalLM,
    records: Sequence[Record],
    reward: Callable[[str, str], float],
    tokenizer: Tokenizer,
    turns: Turns,
    *,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    min_new_tokens: int = 1,
    learning_rate: float,
) -> None:
    """`prompts` prompts a step in the order of the records, `samples` answers each, drawn at temperature 1 by transformers.

    turns is told the tokens of all answers of a step. Every answer is learnt from once, with GRPO's own loss.
    """

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            ids, *rest = super()._generate_single_turn(*args, **kwargs)
            written.note(torch.tensor(float(sum(map(len, ids)))))
            return ids, *rest

    def score(completions: list[str], gold: list[str], **kwargs: Any) -> list[float]:
        return [reward(text, right) for text, right in zip(completions, gold, strict=True)]

    written = _Steps(turns, mean=False)
    steps, rows_of_rank = len(records) // prompts, prompts * samples // dist.get_world_size()
    with _arguments(steps, prompts * samples, rows_of_rank) as arguments:
        del arguments["train_sampling_strategy"]
        trainer = Trainer(
            model,
            reward_funcs=score,
            args=GRPOConfig(
                **{**arguments, "learning_rate": learning_rate},
                num_generations=samples,
                max_completion_length=max_new_tokens,
                generation_kwargs={"min_new_tokens": min_new_tokens},
                shuffle_dataset=False,
                temperature=1.0,
                beta=0.0,
                loss_type="grpo",
            ),
            train_dataset=datasets.Dataset.from_list(
                [{"prompt": record.fields["prompt"], "gold": record.fields["completion"]} for record in records]
            ),
            processing_class=tokenizer_of_transformers(tokenizer),
            callbacks=[written],
        )
        _train(trainer)


class _Steps(TrainerCallback):
    """Adds up what is noted in a step, and tells `turns` the mean over the ranks, or the sum."""

    def __init__(self, turns: Turns, *, mean: bool = True) -> None:
        self._turns, self._mean, self._sum = turns, mean, torch.zeros(())

    def note(self, value: Tensor) -> Tensor:
        self._sum = self._sum + value.detach()
        return value

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        dist.all_reduce(self._sum)
        total, self._sum = self._sum, torch.zeros(())
        self._turns.end_step(total / dist.get_world_size() if self._mean else total)


@contextmanager
def _arguments(steps: int, samples: int, rows: int) -> Iterator[dict[str, Any]]:
    """Arguments of every trainer, for steps of so many samples in microbatches of `rows`."""
    answers_of_rank = samples // dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        yield {
            "output_dir": folder,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "max_steps": steps,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": answers_of_rank // rows,
            "train_sampling_strategy": "sequential",
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_epsilon": EPS,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_NORM,
            "optim": "adamw_torch_fused",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "ddp_find_unused_parameters": False,
        }


def _train(trainer: Any) -> None:
    trainer.train()
    raise AssertionError("the data has ended before the last turn")


def _sft_sample(row: Sequence[Example], packed: bool) -> dict[str, Any]:
    ids = [int(token) for example in row for token in example.ids]
    learn = [bool(learnt) for example in row for learnt in example.learn]
    labels = [token if learnt else -100 for token, learnt in zip(ids, learn, strict=True)]
    lengths = {"seq_lengths": [len(example) for example in row]} if packed else {}
    return {"input_ids": ids, "labels": labels, **lengths}


def _dpo_sample(pair: Unit) -> dict[str, list[int]]:
    chosen, rejected = members(pair)
    prompt = chosen.prompt_length
    return {
        "prompt_ids": chosen.ids[:prompt].tolist(),
        "chosen_ids": chosen.ids[prompt:].tolist(),
        "rejected_ids": rejected.ids[prompt:].tolist(),
    }


def tokenizer_of_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer in transformers' form; pads with its eos."""
    assert tokenizer.bos_id is not None
    names = {
        name: tokenizer.backend.id_to_token(index)
        for name, index in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token=names["bos"], eos_token=names["eos"], pad_token=names["eos"]
    )
