"""Seconds and bytes of calls (cost model): works priced by the forecast and the composed memory estimate, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from torch import Tensor, nn

from meshkit.algos.dataflow import Call, Work
from meshkit.cluster import Cluster
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.plan import Plan
from meshkit.preflight.estimate import MemoryProfiles, compose
from meshkit.preflight.forecast import (
    Batch,
    Profiles,
    StepProfile,
    decode_seconds,
    forecast_profile,
    forward_seconds,
    gather_seconds,
    profile_step,
)
from meshkit.resolve import Resolved, resolve_alike
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import RecomputeMode, Strategy

TRAINED_BYTES = 16  # of a parameter: itself, its gradient and two moments, in fp32
WAVES = 6  # generation in at most 2 ** WAVES parts, one after the other, where the cache does not fit


def score_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """For models that give a number for each token: as a critic's loss reads them."""
    scores: Tensor = model(batch["input_ids"])
    return scores.float().square().sum()


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedModel:
    """A model that calls name. module: on meta is enough. loss: what training computes, for the trace.

    cache_bytes: of the KV cache of a token, in all layers, undivided; None reads it off the module's `config`.
    """

    module: nn.Module
    plan: Plan
    loss: Loss = next_token_loss
    cache_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one work on one mesh. seconds: of an iteration; static_bytes, active_bytes: of the rank that has most."""

    seconds: float
    static_bytes: float
    active_bytes: float


class Costs:
    """Prices works; each layout is resolved once, and each size of a microbatch traced once.

    fixed: what all strategies have, as precision. tokens_per_microbatch: as policy recipes split their rows.
    """

    def __init__(
        self,
        models: dict[str, PlannedModel],
        cluster: Cluster,
        *,
        fixed: Strategy,
        tokens_per_microbatch: int,
        device_bytes: float | None,
    ) -> None:
        self.models, self.cluster, self.fixed = models, cluster, fixed
        self.tokens_per_microbatch, self.device_bytes = tokens_per_microbatch, device_bytes
        self._profiles, self._memory = Profiles(), MemoryProfiles()
        self._known: dict[tuple[Work, MeshSpec, str], Cost] = {}

    def of(self, work: Work, spec: MeshSpec, *, recompute: RecomputeMode = "none") -> Cost:
        """Raises: MeshkitError, as `resolve` does, for a layout that the model refuses."""
        key = work, spec, recompute if work.kind == "train" else ""
        if key not in self._known:
            self._known[key] = self._priced(work, spec, recompute)
        return self._known[key]

    def cluster_of(self, ranks: int) -> Cluster:
        """As so many ranks see it: where ranks share the cores of a host, fewer compute faster."""
        cores, node = self.cluster.host.cores, self.cluster.tiers[0].ranks
        if not cores or ranks >= node:
            return self.cluster
        faster = self.cluster.crowding / max(1.0, ranks / cores)
        device = self.cluster.device
        quick = replace(
            device,
            memory_bytes_per_s=device.memory_bytes_per_s * faster,
            flops_per_s={name: peak * faster for name, peak in device.flops_per_s.items()},
            launch_s=device.launch_s / faster,
            curves=tuple(
                replace(curve, points=tuple((*point[:3], point[3] / faster) for point in curve.points))
                for curve in device.curves
            ),
            memory_curve=tuple((size, seconds / faster) for size, seconds in device.memory_curve),
        )
        # Messages between ranks of a host are copies by its cores, and wait for them as kernels do.
        collectives = tuple(
            replace(each, points=tuple((size, seconds / faster) for size, seconds in each.points))
            for each in self.cluster.collectives
        )
        return replace(self.cluster, device=quick, collectives=collectives)

    def core_s(self, seconds: float, ranks: int) -> float:
        """Seconds of host cores that a call keeps busy; 0 where ranks have devices."""
        return seconds * min(float(ranks), self.cluster.host.cores)

    # ------------------------------------------------------------------------------------------------- one work

    def _priced(self, work: Work, spec: MeshSpec, recompute: RecomputeMode) -> Cost:
        model = self._model(work)
        rows = -(-work.rows // work.minibatches) if work.kind == "train" else work.rows
        if spec.dp_replicate * spec.dp_shard > rows:
            raise PlanError(f"{rows} rows on {spec.dp_replicate * spec.dp_shard} data ranks: some have none.")
        batch = Batch(sequences=rows, seq_len=work.tokens)
        on_rank = batch.rows(spec)
        count = ceil(on_rank / max(1, self.tokens_per_microbatch // work.tokens))
        if spec.pp > 1:
            count = max(count, min(on_rank, 2 * spec.pp))
        strategy = replace(
            self.fixed,
            mesh=spec,
            plan=model.plan,
            microbatches=count,
            memory=replace(self.fixed.memory, recompute=recompute if work.kind == "train" else "none"),
        )
        cluster = self.cluster_of(spec.world_size)
        kernels = cluster.device.kernels
        resolved = resolve_alike(self._profiles.program_of(model.module), strategy, spec, device_type=kernels)
        profile = profile_step(
            resolved, batch, microbatches=count, loss=model.loss, kernels=kernels, profiles=self._profiles
        )
        elements = max(sum(part.trained for part in stage) for stage in profile.stages)
        if work.kind == "train":
            step_s = forecast_profile(profile, cluster).seconds
            static = float(elements * TRAINED_BYTES)
            active = self._train_active(resolved, model, batch, count, static)
            return Cost(seconds=step_s * work.minibatches * work.passes, static_bytes=static, active_bytes=active)
        static = float(elements * _itemsize(profile))
        if work.kind == "infer":
            active = 2 * max((op.bytes for stage in profile.stages for part in stage for op, _ in part.profile.ops))
            seconds = forward_seconds(profile, cluster)
            return Cost(seconds=seconds, static_bytes=static, active_bytes=active if self.device_bytes else 0.0)
        return self._generated(work, model, profile, cluster, static)

    def _train_active(
        self, resolved: Resolved, model: PlannedModel, batch: Batch, count: int, static_bytes: float
    ) -> float:
        if self.device_bytes is None:
            return 0.0
        composed = compose(
            resolved,
            rows=batch.rows(resolved.spec),
            seq_len=batch.seq_len,
            microbatches=count,
            profiles=self._memory,
            loss=model.loss,
            kernels=self.cluster.device.kernels,
        )
        return max(0.0, composed.peak_bytes - static_bytes)

    def _generated(
        self, work: Work, model: PlannedModel, profile: StepProfile, cluster: Cluster, static: float
    ) -> Cost:
        """Prefill of all prompts, then a decode step for each new token but the first, which prefill gives; in as many waves
        as the cache needs to fit. FSDP's shards are gathered once for all of it."""
        spec = profile.spec
        on_rank = -(-work.rows // (spec.dp_replicate * spec.dp_shard))
        cache = self._cache_bytes(work.model, model) / min(spec.tp, self._heads(model) or spec.tp) / spec.pp
        gathered = static * (spec.dp_shard * spec.cp) if spec.dp_shard * spec.cp > 1 else 0.0
        waves = 1
        if self.device_bytes is not None:
            free = self.device_bytes - static - gathered
            while on_rank / waves * work.tokens * cache > free and waves < 2**WAVES:
                waves *= 2
        rows = -(-on_rank // waves)
        step_s = decode_seconds(
            profile,
            cluster,
            rows=rows,
            seq_len=-(-batch_rows(profile, work) // profile.microbatches) * work.tokens,
            context=work.prompt + work.new / 2,
            cache_bytes=cache * spec.pp,
        )
        prefill_s = forward_seconds(profile, cluster) * work.prompt / work.tokens
        seconds = prefill_s + waves * (work.new - 1) * step_s + gather_seconds(profile, cluster)
        active = gathered + rows * work.tokens * cache if self.device_bytes else 0.0
        return Cost(seconds=seconds, static_bytes=static, active_bytes=active)

    def _model(self, work: Work) -> PlannedModel:
        if work.model not in self.models:
            raise PlanError(f"work of model {work.model!r}, which is not there. There are {', '.join(self.models)}.")
        return self.models[work.model]

    def _cache_bytes(self, name: str, model: PlannedModel) -> float:
        if model.cache_bytes is not None:
            return float(model.cache_bytes)
        config = getattr(model.module, "config", None)
        sizes = [getattr(config, each, None) for each in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
        if any(not isinstance(size, int) for size in sizes):
            raise PlanError(
                f"model {name!r}: its config does not say what its cache takes. Give PlannedModel(cache_bytes=...)."
            )
        layers, heads, features = map(int, sizes)  # type: ignore[arg-type]  # whole numbers, as was just asked
        return 2.0 * layers * heads * features * (2 if self.fixed.memory.precision is not None else 4)

    def _heads(self, model: PlannedModel) -> int:
        return int(getattr(getattr(model.module, "config", None), "num_key_value_heads", 0))


def batch_rows(profile: StepProfile, work: Work) -> int:
    """Rows of a data rank."""
    return -(-work.rows // (profile.spec.dp_replicate * profile.spec.dp_shard))


def _itemsize(profile: StepProfile) -> int:
    return {"float32": 4, "float64": 8}.get(profile.dtype, 2)


def works_of(calls: Sequence[Call], mesh: str) -> list[tuple[Call, Work]]:
    return [(call, work) for call in calls if call.on == mesh for work in call.works]
