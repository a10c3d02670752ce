"""Findings of `check`, and their printed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshkit.errors import CheckError
from meshkit.mesh import MeshSpec
from meshkit.preflight._format import format_axes

Kind = Literal[
    "averaged gradient",
    "collectives out of order",
    "different initialisation",
    "gradient reduced twice",
    "missing gradient",
    "not in the optimizer",
    "not initialised",
    "not updated",
    "replicas drift apart",
    "tied weights torn",
    "unreduced gradient",
    "wrong gradient",
    "wrong loss",
    "wrong loss scale",
    "wrong output",
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference from one device, with its likely cause.

    module: where to look; "" is the model itself. parameters: those it shows in, under single-device names. axes: the mesh
    axes it is about, none where it has nothing to do with one.
    """

    kind: Kind
    module: str
    parameters: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    seen: str
    likely: str
    change: str

    def __str__(self) -> str:
        heads = [self.kind, f"module {self.module or '(the model)'}"]
        if self.parameters:
            more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
            heads.append(f"parameter {self.parameters[0]}{more}")
        if self.axes:
            heads.append(f"axis {', '.join(self.axes)}")
        return "\n".join(
            [" · ".join(heads), f"  seen    {self.seen}", f"  likely  {self.likely}", f"  change  {self.change}"]
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The same on every rank. `str()` is the printed form.

    gradient_error, loss_error: the largest difference from one device, relative to the largest gradient and to the loss; None
    where a finding came before there was anything to compare.
    """

    spec: MeshSpec
    findings: tuple[Finding, ...]
    parameters: int
    collectives: int
    gradient_error: float | None = None
    loss_error: float | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def raise_if_found(self) -> None:
        """Raises: CheckError with the printed form, if there is a finding."""
        if self.findings:
            raise CheckError(str(self))

    def __str__(self) -> str:
        axes = format_axes(self.spec.sizes() | {"ep": self.spec.ep, "etp": self.spec.etp}, omit=1) or "one rank"
        watched = f"{self.parameters} parameters, {self.collectives} collectives of rank 0"
        if self.ok:
            return f"check {axes}: no finding. {watched}; largest difference from one device: {self._errors()}"
        many = f"{len(self.findings)} finding" + "s" * (len(self.findings) > 1)
        numbered = (f"{index}. {finding}" for index, finding in enumerate(self.findings, 1))
        return "\n\n".join([f"check {axes}: {many}. {watched}", *numbered])

    def _errors(self) -> str:
        errors = {"gradient": self.gradient_error, "loss": self.loss_error}
        return (
            ", ".join(f"{name} {error:.0e}" for name, error in errors.items() if error is not None)
            or "nothing compared"
        )
