"""How a model without a `mask` generates: each way is tried on a few tokens, and held against the forward of training.

A cache that is not what training computes would write rollouts of another policy, and nobody would see it. So the first way
whose log-probabilities are those of the whole forward is taken, and a model whose forward sees what comes later is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshkit.algos.rollout._rollout import Prompt
from meshkit.algos.rollout._rows import CachedRows, Rows, Way, WholeRows, takes_of, whole_logits
from meshkit.errors import PlanError
from meshkit.loss.vocab_parallel import wide_dtype
from meshkit.step import Run

LONG, SHORT, TOKENS = 9, 5, 12  # of the two rows of a trial: prompts of one length or of two, and the whole rows
FEW = 8  # ids of a trial, at least
# How far log-probabilities may be off, as a share of how much they differ between tokens. Where they are wide, the largest
# of them: a wrong cache is off by a tenth and more, and orders of summation by 1e-6. In 16 bits the mean: rounding there is
# about 0.01, and experts that are chosen anew at a tie put single tokens far off.
TOL_WIDE, TOL_NARROW = 1e-3, 0.1
FLAT = 1e-5  # a model whose log-probabilities differ by less has no values yet, so a trial of it proves nothing

# By model: the way that was found, which stays right as long as its code does. None: whole rows.
_FOUND: WeakKeyDictionary[nn.Module, Way | None] = WeakKeyDictionary()


def rows_of(run: Run, prompts: Sequence[Prompt], vocabulary: int) -> Rows:
    """The cheapest rows whose log-probabilities are those of training's forward. Every rank must call it.

    Warns, on one rank and once for each model, where those are whole rows. Raises: PlanError for a model that is not causal.
    Wire: forwards of a few tokens, and two numbers over the mesh for each way that is tried.
    """
    if run.model not in _FOUND:
        trial = _Trial(run, prompts, vocabulary)
        found = trial.way()
        if found is None and dist.get_rank() == run.mesh.ranks[0]:
            warnings.warn(
                f"generate: {type(run.model).__name__} computes whole rows for each token, since {trial.why}. Answers are "
                "those of its training forward, but slow.",
                stacklevel=3,
            )
        if trial.flat:
            return _rows(run, found)
        _FOUND[run.model] = found
    return _rows(run, _FOUND[run.model])


def _rows(run: Run, way: Way | None) -> Rows:
    return WholeRows(run) if way is None else CachedRows(run.model, run.mesh.device, way)


class _Trial:
    """why: there is no cheaper way than whole rows. flat: the model has no values yet."""

    def __init__(self, run: Run, prompts: Sequence[Prompt], vocabulary: int) -> None:
        self.run, self.why = run, ""
        self._wide = _is_wide(run)
        self._whole = WholeRows(run)
        self._ids = _trial_ids(run, prompts, vocabulary)
        first, second = self._ids
        places = [list(range(LONG - 1, TOKENS)), list(range(SHORT - 1, TOKENS))]
        logits, held = whole_logits(run, self._ids, places, multiple=self._whole.multiple)
        self._expected, self._held = _log_probs(logits), held
        spread = 0.0
        if self._expected is not None and (held is None or held.all()):
            spread = float((self._expected - self._expected.mean(0)).abs().mean())
        self._spread = self._largest(spread)
        self.flat = self._spread < FLAT
        begun = self._whole.begin([first[:LONG], second[:SHORT]], [1, 1])
        off = self._off([(*begun, [0, TOKENS - LONG + 1])])
        if off > self._tolerance:
            raise PlanError(
                f"generate: {type(run.model).__name__} is not causal: what follows a token changes its logits, by {off:.2g} "
                "of how much those of tokens differ. Its answers have no probability that a policy could learn; use a "
                "causal language model."
            )

    def way(self) -> Way | None:
        mesh = self.run.mesh.spec
        if self.run.pipeline is not None or mesh.cp > 1 or self.run.resolved.sequence:
            axis = f"pp={mesh.pp}" if mesh.pp > 1 else f"cp={mesh.cp}" if mesh.cp > 1 else "sequence parallelism"
            self.why = f"its own cache is used on dp, tp and ep alone, and here is {axis}"
            return None
        takes = takes_of(self.run.model)
        if "use_cache" not in takes:
            self.why = "its forward takes no `mask` and no `use_cache`"
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

    @property
    def _tolerance(self) -> float:
        return TOL_WIDE if self._wide else TOL_NARROW

    def _tried(self, way: Way) -> tuple[float, str]:
        """How far it is off, or infinity and why it raised."""
        rows = CachedRows(self.run.model, self.run.mesh.device, way)
        first, second = self._ids
        short = SHORT if rows.mixed else LONG
        of_first, of_second = 0, TOKENS - LONG + 1 + short - SHORT  # places of these tokens among the expected
        try:
            parts = [(*rows.begin([first[:LONG], second[:short]], [1, 2]), [of_first, of_second])]
            rows.keep(torch.tensor([2, 0], device=self.run.mesh.device))
            for step in range(TOKENS - LONG):
                ids = torch.stack([second[short + step], first[LONG + step]]).to(self.run.mesh.device)
                parts.append((*rows.grow(ids), [of_second + step + 1, of_first + step + 1]))
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:
            # Whatever another's forward raises when it is called like this, it is no way to call it.
            parts, reason = [], f"of its own cache: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return self._largest(math.inf), reason
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
        return self._largest(worst / max(self._spread, FLAT))

    def _largest(self, value: float) -> float:
        """Over the mesh. NaN, as of a model with NaN in it, is infinity."""
        largest = torch.tensor(math.inf if math.isnan(value) else value, device=self.run.mesh.device)
        if self.run.mesh.spec.world_size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.run.mesh.group)
        return float(largest)


def _is_wide(run: Run) -> bool:
    precision = run.resolved.memory.precision
    dtype = next(run.model.parameters()).dtype if precision is None else precision.compute
    return dtype == wide_dtype(dtype)


def _log_probs(logits: Tensor | None) -> Tensor | None:
    """[n, whole vocabulary]."""
    if logits is None:
        return None
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return whole.to(wide_dtype(whole.dtype)).log_softmax(-1)


def _trial_ids(run: Run, prompts: Sequence[Prompt], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Two rows of ids that prompts have; with few of them, also of ids that no config gives a meaning."""
    ids = np.unique(np.concatenate([np.zeros(0, np.int64), *(prompt.ids for prompt in prompts)]))
    if len(ids) < FEW:
        special = _special_ids(getattr(run.resolved.program.model, "config", None))
        spaced = np.linspace(0, vocabulary - 1, min(vocabulary, 4 * FEW)).astype(np.int64)
        ids = np.unique(np.concatenate([ids, [id for id in spaced if id not in special]]).astype(np.int64))
    rows = np.random.default_rng(0).choice(ids, (2, TOKENS))
    return torch.from_numpy(rows[0]), torch.from_numpy(rows[1])


def _special_ids(config: object) -> set[int]:
    """Of padding, images, ...: what a transformers config names as a token."""
    named = {name: value for name, value in vars(config).items() if "token" in name} if config is not None else {}
    values = [each for value in named.values() for each in (value if isinstance(value, list | tuple) else [value])]
    return {each for each in values if type(each) is int}
