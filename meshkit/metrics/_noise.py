"""Gradient noise scale: the critical batch size, from gradient norms of a step and of its parts.

A gradient of n tokens is the true one plus noise whose squared norm is S / n, so norms of two sizes tell both apart.
Tokens of one row resemble each other: parts are whole rows, and n counts them in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshkit.errors import MeshkitError


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """tokens: S / |G|², the simple noise scale, near which the critical batch is; inf while noise hides the gradient.

    low, high: two standard errors to either side, by a jackknife over steps; nan for one step. steps: of which it is a mean.
    """

    tokens: float
    low: float
    high: float
    steps: int

    def __str__(self) -> str:
        if math.isinf(self.tokens):
            return f"gradient noise scale above what {self.steps} steps can tell: the gradient is hidden in its noise"
        return f"gradient noise scale {self.tokens:.3g} tokens ({self.low:.3g} to {self.high:.3g}), {self.steps} steps"


class GradientNoise:
    """Estimates the gradient noise scale over the last `kept` steps, without a bias in either of its two parts.

    A run that is resumed goes on from its `state_dict`, as `extra` of a checkpoint, or followed by an outer optimizer.
    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1: a quotient of means, not a mean of quotients.
    """

    def __init__(self, *, kept: int = 200) -> None:
        self._kept = kept
        self._noise: list[float] = []  # S of each step, squared norm times tokens
        self._signal: list[float] = []  # |G|² of each step

    def add(
        self, part_norms: Sequence[float], part_tokens: Sequence[int], whole_norm: float, whole_tokens: int
    ) -> None:
        """One step: norms of the mean gradients of some of its parts and of the whole, all at the same parameters.

        Norms are before clipping. One part is enough, as the first of two halves; parts may differ in tokens.
        Raises: MeshkitError for parts without tokens, as large as the whole, or numbers that are not finite.
        """
        if not part_tokens or len(part_norms) != len(part_tokens) or min(part_tokens) < 1:
            raise MeshkitError(
                f"part_norms={part_norms}, part_tokens={part_tokens}: give a norm and the tokens of each part."
            )
        # Weighted by tokens, E|g_i|² = |G|² + S / n_i has the noise of a part of this size.
        tokens = sum(part_tokens) / len(part_tokens)
        part = sum(n * norm**2 for n, norm in zip(part_tokens, part_norms, strict=True)) / sum(part_tokens)
        if not tokens < whole_tokens:
            raise MeshkitError(
                f"parts of {tokens:g} tokens, and a whole of {whole_tokens}: a part is smaller than the whole."
            )
        whole = whole_norm**2
        if not math.isfinite(part + whole):
            raise MeshkitError(
                f"norms {part_norms} of parts, {whole_norm} of the whole: leave steps out that are not finite."
            )
        self._noise.append((part - whole) / (1 / tokens - 1 / whole_tokens))
        self._signal.append((whole_tokens * whole - tokens * part) / (whole_tokens - tokens))
        del self._noise[: -self._kept], self._signal[: -self._kept]

    def state_dict(self) -> dict[str, list[float]]:
        """Both parts of each step that is kept."""
        return {"noise": list(self._noise), "signal": list(self._signal)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Raises: MeshkitError for parts of other numbers of steps."""
        noise, signal = ([float(each) for each in state[name]] for name in ("noise", "signal"))
        if len(noise) != len(signal):
            raise MeshkitError(
                f"GradientNoise: a state of {len(noise)} and {len(signal)} steps. Give one of state_dict()."
            )
        self._noise, self._signal = noise[-self._kept :], signal[-self._kept :]

    def scale(self) -> NoiseScale:
        """Of the steps that were added. Raises: MeshkitError for none."""
        steps = len(self._noise)
        if not steps:
            raise MeshkitError("GradientNoise.scale() before a step: call add() first.")
        noise, signal = math.fsum(self._noise), math.fsum(self._signal)
        if signal <= 0 or noise < 0:
            # Noise below 0 is chance as well: then it is small beside the gradient.
            tokens = math.inf if signal <= 0 else 0.0
            return NoiseScale(tokens=tokens, low=math.nan, high=math.nan, steps=steps)
        tokens = noise / signal
        error = math.nan
        if steps > 1:
            # A step is left out at a time. Near a signal of 0 the quotient jumps, and so do its bounds.
            without = [
                (noise - s) / (signal - g) if signal != g else math.inf
                for s, g in zip(self._noise, self._signal, strict=True)
            ]
            mean = math.fsum(without) / steps
            error = math.sqrt((steps - 1) / steps * math.fsum((each - mean) ** 2 for each in without))
        return NoiseScale(tokens=tokens, low=max(0.0, tokens - 2 * error), high=tokens + 2 * error, steps=steps)
