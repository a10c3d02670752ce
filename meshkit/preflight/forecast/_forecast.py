"""forecast: seconds of a step before the run, from the user's module, a strategy and a cluster. No GPU, no ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from meshkit.cluster import Cluster
from meshkit.mask import Mask
from meshkit.mesh import MeshSpec
from meshkit.preflight._arguments import spec_of
from meshkit.preflight._inner import inner_mesh
from meshkit.preflight._moved import traced_offload
from meshkit.preflight._thin import alike_blocks
from meshkit.preflight.estimate import Kernels
from meshkit.preflight.forecast._batch import Batch
from meshkit.preflight.forecast._price import price
from meshkit.preflight.forecast._profile import ModelProfile, Profile, StepProfile
from meshkit.preflight.forecast._profiles import profile_model
from meshkit.preflight.forecast._result import Forecast
from meshkit.preflight.forecast._step import step_profile
from meshkit.program import Program, read_program
from meshkit.resolve import Resolved, resolve_alike
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import Strategy


class Profiles:
    """What was read and traced of models already, for many forecasts of the same ones: strategies that differ in dp, pp, the
    schedule or the number of microbatches trace nothing again. The models may not change meanwhile.
    """

    def __init__(self) -> None:
        self._programs: dict[int, Program] = {}  # by id of the model, which the program keeps alive
        self._known: dict[Hashable, ModelProfile] = {}
        self._alike: dict[Hashable, tuple[ModelProfile, dict[Hashable, Profile]]] = {}
        self._traced: list[object] = []  # of what; these are kept, so that their ids stay their own

    def __len__(self) -> int:
        return len(self._traced)

    def program_of(self, model: nn.Module) -> Program:
        """Read once, so that proofs about it are made once."""
        if id(model) not in self._programs:
            self._programs[id(model)] = read_program(model)
        return self._programs[id(model)]

    def of(
        self,
        resolved: Resolved,
        *,
        rows: int,
        seq_len: int,
        mask: Mask | Sequence[Mask] | None = None,
        loss: Loss = next_token_loss,
        kernels: Kernels = "cuda",
    ) -> ModelProfile:
        """What `profile_model` returns."""
        strategy, alike = resolved.strategy, alike_blocks(resolved)
        key: Hashable = (
            id(resolved.program.model),
            inner_mesh(resolved.spec),
            frozenset(alike.values()),
            repr(
                (
                    strategy.plan,
                    resolved.plan,
                    strategy.context,
                    strategy.experts,
                    replace(strategy.memory, offload=traced_offload(resolved)),
                    strategy.compile,
                )
            ),
            (resolved.sequence, resolved.compute, rows, seq_len, id(mask), loss, kernels),
        )
        exact = key, tuple(resolved.treatments.items())
        if exact not in self._known and key in self._alike:
            # Other blocks of the same kinds are treated so.
            profile, of_kinds = self._alike[key]
            self._known[exact] = replace(profile, blocks={name: of_kinds[kind] for name, kind in alike.items()})
        if exact not in self._known:
            profile = profile_model(resolved, rows=rows, seq_len=seq_len, mask=mask, loss=loss, kernels=kernels)
            self._traced.append((resolved.program, mask))
            self._known[exact] = profile
            of_kinds = {alike[name]: each for name, each in profile.blocks.items()}
            if all(each is of_kinds[alike[name]] for name, each in profile.blocks.items()):
                self._alike[key] = profile, of_kinds
        return self._known[exact]


def forecast(
    model: nn.Module,
    strategy: Strategy | None = None,
    cluster: Cluster | str = "h100",
    batch: Batch | None = None,
    *,
    spec: MeshSpec | str | None = None,
    mask: Mask | Sequence[Mask] | None = None,
    loss: Loss = next_token_loss,
    profiles: Profiles | None = None,
    **choices: Any,
) -> Forecast:
    """Seconds of one optimizer step of `parallelize(model, mesh, strategy)` on the cluster, tokens/s and MFU, with a ledger.

    model: any nn.Module, on meta is enough. strategy, or its choices by keyword: as `parallelize` takes them. cluster: a
    `Cluster`, the name of a datasheet, or a file. batch: of the whole job; default one sequence of 4,096 tokens for every
    microbatch of every data rank. spec: default, the strategy's mesh. mask: who sees whom, as `explain` takes it. profiles:
    kept between calls.
    What is computed is traced from the model, on fake tensors; what is sent is what `explain` says. Activations that are
    offloaded are copied beside blocks. Not priced: the overlap of FB rows of dualpipe-v, stragglers beyond `faults.jitter`;
    and what `Forecast.unpriced` says.
    Raises: as `parallelize` does, with the same texts; ClusterError for a mesh or a dtype that the cluster has not.
    """
    chosen = Strategy.of(strategy, choices)
    sizes = spec_of(spec, chosen)
    machine = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    kept = Profiles() if profiles is None else profiles
    resolved = resolve_alike(kept.program_of(model), chosen, sizes, device_type=machine.device.kernels)
    count = chosen.microbatches or 1
    step = batch or Batch(sequences=count * sizes.dp_replicate * sizes.dp_shard, seq_len=4096)
    return forecast_resolved(resolved, machine, step, microbatches=count, mask=mask, loss=loss, profiles=kept)


def forecast_resolved(
    resolved: Resolved,
    cluster: Cluster,
    batch: Batch,
    *,
    microbatches: int = 1,
    mask: Mask | Sequence[Mask] | None = None,
    loss: Loss = next_token_loss,
    profiles: Profiles | None = None,
) -> Forecast:
    """`forecast` of a strategy that is resolved already."""
    profile = profile_step(
        resolved,
        batch,
        microbatches=microbatches,
        mask=mask,
        loss=loss,
        kernels=cluster.device.kernels,
        profiles=Profiles() if profiles is None else profiles,
    )
    return forecast_profile(profile, cluster)


def profile_step(
    resolved: Resolved,
    batch: Batch,
    *,
    microbatches: int,
    mask: Mask | Sequence[Mask] | None = None,
    loss: Loss = next_token_loss,
    kernels: Kernels = "cuda",
    profiles: Profiles,
    computed: ModelProfile | None = None,
) -> StepProfile:
    """The step without a cluster; `forecast_profile` prices it on any.

    computed: kernels of a microbatch that are taken for this strategy's own, of which nothing is traced then.
    """
    rows = batch.rows(resolved.spec)
    resolved.refuse_tokens(batch.seq_len)
    if computed is None:
        computed = profiles.of(
            resolved, rows=-(-rows // microbatches), seq_len=batch.seq_len, mask=mask, loss=loss, kernels=kernels
        )
    return step_profile(
        resolved,
        computed,
        rows=rows,
        seq_len=batch.seq_len,
        sequences=batch.sequences,
        microbatches=microbatches,
        mask=mask,
    )


def forecast_profile(profile: StepProfile, cluster: Cluster) -> Forecast:
    """Pure, and milliseconds: what searches and what-ifs about clusters call."""
    return Forecast(profile=profile, cluster=cluster, priced=price(profile, cluster))
