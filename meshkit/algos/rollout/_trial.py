"""How a model without a `mask` generates: each way is tried on a few tokens, and held against the forward of training.

A cache that is not what training computes would write rollouts of another policy, and nobody would see it. So the first way
whose log-probabilities are those of the whole forward is taken, and a model whose forward sees what comes later is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.algos.rollout._rows import CACHES, CachedRows, Rows, Way, WholeRows, takes_any, takes_of, whole_logits
from meshkit.errors import MeshkitError, PlanError
from meshkit.loss.vocab_parallel import wide_dtype
from meshkit.step import Run

# Tokens of the prompts of a trial, which those of one length all have as the first, and how many follow: more padding than
# the windows of small models, and enough rows that what is chosen by top-k shows.
LENGTHS, GROWN = (13, 4, 9, 6), 6
TOKENS = LENGTHS[0] + GROWN
SAMPLES, KEPT, ORDER = [1, 2, 1, 1], [4, 2, 0, 3], [3, 1, 0, 2]  # the rows kept, and which prompts they are of
FEW = 8  # ids of a trial, at least
# How far log-probabilities may be off, as a share of how much they differ between tokens. Where they are wide, the largest
# of them: a wrong cache is off by a tenth and more, and orders of summation by 1e-6. In 16 bits the mean: rounding there is
# about 0.01, and experts that are chosen anew at a tie put single tokens far off.
TOL_WIDE, TOL_NARROW = 1e-3, 0.1
MOST = (
    0.8  # of an answer's tokens must be right: experts chosen anew at a tie put one off, in a long answer, in any dtype
)
FLAT = 1e-5  # a model whose log-probabilities differ by less has no values yet, so a trial of it proves nothing


@dataclass(frozen=True)
class Found:
    """way: None is whole rows. spread: how much log-probabilities differ between tokens."""

    way: Way | None
    spread: float


# What is right as long as the model's code does.
_FOUND: WeakKeyDictionary[nn.Module, Found] = WeakKeyDictionary()


def rows_of(run: Run, prompts: Sequence[Prompt], vocabulary: int) -> Rows:
    """The cheapest rows whose log-probabilities are those of training's forward. Every rank must call it.

    Warns, on one rank and once for each model, where those are whole rows. Raises: PlanError for a model that is not causal,
    or whose forward raises. Wire: forwards of a few tokens, and a number over the mesh for each way that is tried.
    """
    found = _FOUND.get(run.model)
    if found is None:
        trial = _Trial(run, prompts, vocabulary)
        found = Found(trial.way(), trial.spread)
        if found.way is None:
            _warn(run, trial.why)
        if trial.spread >= FLAT:
            _FOUND[run.model] = found
    return WholeRows(run) if found.way is None else CachedRows(run.model, run.mesh.device, found.way)


def refuted(run: Run, rows: Rows, rollouts: Sequence[Rollout], temperature: float, version: int) -> Rows | None:
    """Whole rows, where training's forward does not give two of these rollouts their log-probabilities; else None.

    version: of the weights; only tokens that they wrote are compared.

    A trial is short: what begins after more tokens than it has, as a window, shows in the longest rollout, and what padding
    does in that of the shortest prompt. Every rank must call it; one without rollouts computes a token.
    Raises: PlanError where whole rows are refuted too. Wire: a forward, and a number over the mesh.
    """
    found = _FOUND.get(run.model)
    if found is None:
        return None
    off = _largest(run, _off_training(run, rollouts, temperature or 1.0, version) / found.spread)
    if off <= _tolerance(run):
        return None
    if isinstance(rows, WholeRows):
        raise _not_causal(run, off)
    _FOUND[run.model] = Found(None, found.spread)
    _warn(run, f"an answer's log-probabilities over its own cache are off by {off:.2g} of their spread")
    return WholeRows(run)


def _off_training(run: Run, rollouts: Sequence[Rollout], temperature: float, version: int) -> float:
    """How far the log-probabilities of these two are from those of their whole rows."""
    chosen: list[Rollout] = []
    if rollouts:
        chosen = [
            max(rollouts, key=lambda each: len(each.tokens)),
            min(rollouts, key=lambda each: len(each.prompt_ids)),
        ]
    tokens = [torch.from_numpy(each.tokens) for each in chosen] or [torch.zeros(1, dtype=torch.int64)]
    places = [list(range(len(each.prompt_ids) - 1, len(each.tokens) - 1)) for each in chosen] or [[0]]
    logits, held = whole_logits(run, tokens, places, multiple=WholeRows(run).multiple)
    log_probs = _log_probs(logits, temperature)
    if not chosen or log_probs is None:
        return 0.0
    held = torch.ones(len(log_probs), dtype=torch.bool, device=log_probs.device) if held is None else held
    worst = 0.0
    counts = [len(each.ids) for each in chosen]
    for each, of_row, here in zip(chosen, log_probs.split(counts), held.split(counts), strict=True):
        assert each.log_probs is not None and each.versions is not None
        present = here & torch.from_numpy(each.versions == version).to(here.device)
        written = torch.from_numpy(each.ids).to(of_row.device).unsqueeze(1)
        apart = (of_row.gather(1, written).squeeze(1) - torch.from_numpy(each.log_probs).to(of_row)).abs()[present]
        if len(apart):
            worst = max(worst, float(apart.double().quantile(MOST)))
    return worst * temperature


def _not_causal(run: Run, off: float) -> PlanError:
    return PlanError(
        f"generate: {type(run.model).__name__} is not causal: what follows a token changes its log-probabilities, by "
        f"{off:.2g} of how much those of tokens differ. So an answer has none that a policy could learn; use a causal "
        "language model."
    )


def _warn(run: Run, why: str) -> None:
    if dist.get_rank() == run.mesh.ranks[0]:
        warnings.warn(
            f"generate: {type(run.model).__name__} computes whole rows for each token, since {why}. Answers are those of its "
            "training forward, but slow.",
            stacklevel=4,
        )


class _Trial:
    """why: there is no cheaper way than whole rows. spread: of the model's log-probabilities; see `FLAT`."""

    def __init__(self, run: Run, prompts: Sequence[Prompt], vocabulary: int) -> None:
        self.run, self.why = run, ""
        self._wide, self._tolerance = _is_wide(run), _tolerance(run)
        self._whole = WholeRows(run)
        self._ids = _trial_ids(run, prompts, vocabulary)
        places = [list(range(length - 1, TOKENS)) for length in LENGTHS]
        try:
            logits, held = whole_logits(run, self._ids, places, multiple=self._whole.multiple)
        except (torch.OutOfMemoryError, dist.DistError, MeshkitError):
            raise
        except Exception as error:
            raise PlanError(
                f"generate: {type(run.model).__name__} raises {type(error).__name__} for rows of {TOKENS} tokens, as "
                f"generation gives them: {one_line(error)}. Use a model whose forward takes rows of any length."
            ) from error
        self._expected, self._held = _log_probs(logits), held
        spread = 0.0
        if self._expected is not None:
            rows = self._expected if held is None else self._expected[held]
            spread = float((rows - rows.mean(0)).abs().mean()) if len(rows) else 0.0
        self.spread = _largest(run, spread)
        begun = self._whole.begin(
            [row[:length] for row, length in zip(self._ids, LENGTHS, strict=True)], [1] * len(LENGTHS)
        )
        off = self._off([(*begun, [_place(row, length - 1) for row, length in enumerate(LENGTHS)])])
        if off > self._tolerance:
            raise _not_causal(run, off)

    def way(self) -> Way | None:
        mesh = self.run.mesh.spec
        if self.run.pipeline is not None or mesh.cp > 1 or self.run.resolved.sequence:
            axis = f"pp={mesh.pp}" if mesh.pp > 1 else f"cp={mesh.cp}" if mesh.cp > 1 else "sequence parallelism"
            self.why = f"its own cache is used on dp, tp and ep alone, and here is {axis}"
            return None
        takes = takes_of(self.run.model)
        if not takes & {"use_cache", *CACHES} and not takes_any(self.run.model):
            self.why = "its forward takes no `mask`, and no cache"
            return None
        ways: list[Way] = ["plain"]
        ways = ["padded", *ways] if "attention_mask" in takes else ways
        ways = [*ways, "positions"] if "position_ids" in takes else ways
        reasons = []
        for way in ways:
            off, reason = self._tried(way)
            if off <= self._tolerance:
                return way
            reasons.append(reason or f"log-probabilities over its own cache are off by {off:.2g} of their spread")
        self.why = reasons[ways.index("plain")]
        return None

    def _tried(self, way: Way) -> tuple[float, str]:
        """How far it is off, or infinity and why it raised."""
        rows = CachedRows(self.run.model, self.run.mesh.device, way)
        lengths = LENGTHS if rows.mixed else (LENGTHS[0],) * len(LENGTHS)
        begins = [row[:length] for row, length in zip(self._ids, lengths, strict=True)]
        try:
            parts = [(*rows.begin(begins, SAMPLES), [_place(row, length - 1) for row, length in enumerate(lengths)])]
            rows.keep(torch.tensor(KEPT, device=self.run.mesh.device))
            for step in range(GROWN):
                ids = torch.stack([self._ids[row][lengths[row] + step] for row in ORDER]).to(self.run.mesh.device)
                parts.append((*rows.grow(ids), [_place(row, lengths[row] + step) for row in ORDER]))
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:
            # Whatever another's forward raises when it is called like this, it is no way to call it.
            return _largest(self.run, math.inf), f"its own cache raises {type(error).__name__} ({one_line(error)})"
        return self._off(parts), ""

    def _off(self, parts: Sequence[tuple[Tensor | None, Tensor | None, list[int]]]) -> float:
        """How far these logits are from the expected at these places, in spreads, at the worst rank."""
        worst = 0.0
        for logits, held, places in parts:
            found = _log_probs(logits)
            if found is None:
                continue
            assert self._expected is not None
            off = (found - self._expected[places]).abs()
            if held is not None:
                assert self._held is not None
                off = off[held & self._held[places]]
            if off.numel():
                worst = max(worst, float(off.amax() if self._wide else off.mean()))
        return _largest(self.run, worst / max(self.spread, FLAT))


def _largest(run: Run, value: float) -> float:
    """Over the mesh. NaN, as of a model with NaN in it, is infinity."""
    largest = torch.tensor(math.inf if math.isnan(value) else value, device=run.mesh.device)
    if run.mesh.spec.world_size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=run.mesh.group)
    return float(largest)


def _tolerance(run: Run) -> float:
    return TOL_WIDE if _is_wide(run) else TOL_NARROW


def _is_wide(run: Run) -> bool:
    precision = run.resolved.memory.precision
    dtype = next(run.model.parameters()).dtype if precision is None else precision.compute
    return dtype == wide_dtype(dtype)


def _log_probs(logits: Tensor | None, temperature: float = 1.0) -> Tensor | None:
    """[n, whole vocabulary]."""
    if logits is None:
        return None
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return (whole.to(wide_dtype(whole.dtype)) / temperature).log_softmax(-1)


def _place(row: int, token: int) -> int:
    """Where the logits of a row's token are among the expected, which has those from the end of its prompt on."""
    return sum(TOKENS - length + 1 for length in LENGTHS[:row]) + token - (LENGTHS[row] - 1)


def _trial_ids(run: Run, prompts: Sequence[Prompt], vocabulary: int) -> list[Tensor]:
    """Rows of ids that prompts have; with few of them, also of ids that no config gives a meaning."""
    ids = np.unique(np.concatenate([np.zeros(0, np.int64), *(prompt.ids for prompt in prompts)]))
    if len(ids) < FEW:
        special = _special_ids(getattr(run.resolved.program.model, "config", None))
        spaced = np.linspace(0, vocabulary - 1, min(vocabulary, 4 * FEW)).astype(np.int64)
        ids = np.unique(np.concatenate([ids, [id for id in spaced if id not in special]]).astype(np.int64))
    return [torch.from_numpy(row) for row in np.random.default_rng(0).choice(ids, (len(LENGTHS), TOKENS))]


def _special_ids(config: object) -> set[int]:
    """Of padding, images, ...: what a transformers config names as a token."""
    named = {name: value for name, value in vars(config).items() if "token" in name} if config is not None else {}
    values = [each for value in named.values() for each in (value if isinstance(value, list | tuple) else [value])]
    return {each for each in values if type(each) is int}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
