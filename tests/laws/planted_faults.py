"""Small faults that a test must see (mutation testing by hand): plants each in a copy of the tree, and runs its test there.

    python -m tests.laws.planted_faults        all
    python -m tests.laws.planted_faults 2 15   those

Each is found by its text, wherever in the package it is by now; a text that has changed is a fault to be written anew.
Ends with 1 if a fault survives, does not fit, or its test fails without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("meshkit", "tests", "docs", "examples", "pyproject.toml", "README.md")
TIME_S = 200.0  # of a test on a loaded machine; ranks that hang: [Note: stuck ranks] in tests/world.py


@dataclass(frozen=True)
class Fault:
    """number: in the list of issue 18. old: as it is, once in the package; new: what is planted; test: what must fail."""

    number: int
    old: str
    new: str
    test: str

    def plant(self, tree: Path) -> None:
        files = [file for file in (tree / "meshkit").rglob("*.py") for _ in range(file.read_text().count(self.old))]
        if len(files) != 1:
            raise LookupError(f"{self.old!r} is {len(files)} times in meshkit, and has to be there once")
        files[0].write_text(files[0].read_text().replace(self.old, self.new))


FAULTS = [
    Fault(
        1,
        "out, lse, table, ctx.group, ctx.scale)",
        "out, lse, table, ctx.group, q.shape[-1] ** -0.5)",
        "tests/parallel/context/test_attention.py::test_a_scale_of_ones_own_reaches_outputs_and_gradients",
    ),
    Fault(
        2,
        "torch.where(same, buffers.master, values.to(buffers.dtype))",
        "values.to(buffers.dtype)",
        "tests/optim/test_host_offload.py::test_a_bf16_model_goes_on_after_a_load_with_all_bits_of_its_masters",
    ),
    Fault(
        3,
        "buffers.has_gradient = False\n                self._adopt(buffers)",
        "self._adopt(buffers)",
        "tests/optim/test_host_offload.py::test_a_step_uses_its_gradients_up",
    ),
    Fault(
        4,
        "for layer in layers:\n            layer._adapter_on = True",
        "for layer in layers[1:]:\n            layer._adapter_on = True",
        "tests/lora/test_lora.py::test_after_lora_disabled_every_adapter_counts_again",
    ),
    Fault(
        5,
        "up[rows].to(dtype) @ down[:, columns].to(dtype)",
        "up[rows] @ down[:, columns]",
        "tests/lora/test_lora.py::test_merging_in_bf16_rounds_once",
    ),
    Fault(
        6,
        "heads[rank].query // heads[rank].kv",
        "heads[0].query // heads[0].kv",
        "tests/laws/parity/test_transformers.py::test_heads_that_tp_does_not_divide_repeat_as_many_keys_as_each_rank_reads",
    ),
    Fault(
        7,
        "extra = last if run == count else 0",
        "extra = 0",
        "tests/laws/parity/test_pipeline.py::test_no_other_stages_have_a_cheaper_dearest_one",
    ),
    Fault(
        8,
        "ceil(capacity.factor * pairs / experts)",
        "int(capacity.factor * pairs / experts)",
        "tests/parallel/expert/test_conformance.py::test_a_share_that_is_no_whole_number_is_rounded_up",
    ),
    Fault(
        9,
        "(self.op, self.size, self.dtype) == (other.op, other.size, other.dtype)",
        "(self.op, self.size) == (other.op, other.size)",
        "tests/preflight/check/test_check.py::test_a_planted_mistake_is_found_and_named[other_dtype]",
    ),
    Fault(
        10,
        "not _finite(out) and _finite((args, kwargs))",
        "not _finite(out)",
        "tests/test_step.py::test_what_is_made_between_modules_is_laid_to_the_one_around_them",
    ),
    Fault(
        11,
        "not now.left and before is not None",
        "before is not None",
        "tests/faults/test_heartbeat.py::test_a_rank_that_said_how_it_ended_is_not_silent_after_it",
    ),
    Fault(
        12,
        "+ passing + beside * moving",
        "+ passing + moving",
        "tests/memory/test_budget.py::test_the_choice_is_the_best_of_all_there_are",
    ),
    Fault(
        13,
        "before >= sampling.top_p",
        "before > sampling.top_p",
        "tests/algos/rollout/test_generate.py::test_top_p_that_is_met_exactly_takes_no_further_token",
    ),
    Fault(
        14,
        "weight**2 / (tokens * squared)",
        "weight**2 / ((tokens - 1) * squared)",
        "tests/algos/policy/test_silent_errors.py::test_the_effective_share_is_that_of_kish",
    ),
    Fault(
        15,
        "sorted(transfers, key=lambda transfer: -transfer.dtype.itemsize)",
        "transfers",
        "tests/algos/reallocate/test_move.py::test_tensors_of_several_dtypes_share_a_message_whatever_their_sizes",
    ),
    Fault(
        16,
        "((part_loss + collected.total()) * weight / tokens)",
        "((part_loss + collected.total()) / tokens)",
        "tests/parallel/expert/test_experts.py::test_microbatches_without_rows_count_neither_in_losses_nor_in_counts_of_experts",
    ),
    Fault(
        17,
        "report.total() * weight / self.scale if report.losses",
        "report.total() / self.scale if report.losses",
        "tests/parallel/expert/test_experts.py::test_microbatches_without_rows_count_neither_in_losses_nor_in_counts_of_experts",
    ),
    Fault(
        18,
        "counts = counts * int(weight != 0)",
        "counts = counts * 1",
        "tests/parallel/expert/test_experts.py::test_microbatches_without_rows_count_neither_in_losses_nor_in_counts_of_experts",
    ),
    Fault(
        19,
        "pending.wait()\n        block = arriving\n\n\ndef ring_gradients",
        "block = arriving\n\n\ndef ring_gradients",
        "tests/parallel/context/test_attention.py::test_a_scale_of_ones_own_reaches_outputs_and_gradients[ring]",
    ),
    Fault(
        20,
        "pending.wait()\n            dkv += arriving",
        "dkv += arriving",
        "tests/parallel/context/test_attention.py::test_outputs_and_gradients_equal_one_attention[3]",
    ),
    Fault(
        21,
        "pending.wait()\n    assert arriving",
        "assert arriving",
        "tests/parallel/context/test_attention.py::test_a_scale_of_ones_own_reaches_outputs_and_gradients[ring]",
    ),
    Fault(
        22,
        "pending.wait()\n        _add_to_keys",
        "_add_to_keys",
        "tests/parallel/context/test_attention.py::test_outputs_and_gradients_equal_one_attention[3]",
    ),
    Fault(
        23,
        "pending.wait()\n    _add_to_keys",
        "_add_to_keys",
        "tests/parallel/context/test_attention.py::test_a_scale_of_ones_own_reaches_outputs_and_gradients[group_cast]",
    ),
    Fault(
        24,
        "            part.add_(error)\n",
        "            pass\n",
        "tests/parallel/test_wires.py::test_what_was_reduced_and_what_is_kept_are_all_gradients_together",
    ),
    Fault(
        25,
        "sent[replica] += (total - self._decoded(result, working))[0]",
        "sent[replica] += 0",
        "tests/parallel/test_wires.py::test_a_run_equals_the_definition_in_one_process",
    ),
    Fault(
        26,
        "summed = local_tensor(errors[parameter.name]).sum(0, keepdim=True, dtype=torch.float32)",
        "summed = local_tensor(errors[parameter.name])[:1]",
        "tests/parallel/test_wires.py::test_other_data_ranks_keep_all_that_was_rounded_away",
    ),
]


def run_tests(tree: Path, tests: list[str]) -> tuple[bool, float]:
    """(whether they pass, seconds)."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output = process.communicate(timeout=TIME_S * len(tests))[0]
        finally:
            process.kill()
    if process.returncode not in (0, 1):  # as for a test that is not there any more
        raise LookupError(f"pytest ended with {process.returncode}:\n{output[-2000:]}")
    return process.returncode == 0, time.monotonic() - began


def killed(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory(prefix="meshkit-fault-") as folder:
        tree = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, tree / name)
        try:
            fault.plant(tree)
            passes, seconds = run_tests(tree, [fault.test])
        except (LookupError, subprocess.TimeoutExpired) as error:
            print(f"{fault.number}: {error}", flush=True)
            return False
    print(f"{fault.number}: {'SURVIVED' if passes else 'killed'} in {seconds:.0f} s by {fault.test}", flush=True)
    return not passes


def main(numbers: list[int]) -> bool:
    chosen = [fault for fault in FAULTS if not numbers or fault.number in numbers]
    sound, seconds = run_tests(ROOT, sorted({fault.test for fault in chosen}))
    print(f"without a fault the tests {'pass' if sound else 'FAIL'} in {seconds:.0f} s", flush=True)
    survivors = [fault.number for fault in chosen if not killed(fault)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed; not so: {survivors or 'none'}")
    return sound and not survivors


if __name__ == "__main__":
    sys.exit(not main([int(text) for text in sys.argv[1:]]))
