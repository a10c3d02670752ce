"""A cell of the gate: one choice for everything that a run can choose, as data that prints as one line and reads back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

import meshkit as mk

MODELS = ("dense", "tied", "qwen", "window", "moe", "mla", "mlp", "transformers", "lora")
MIXERS = ("delta", "mamba2")  # drawn by `draw_hybrid` alone, so that a seed draws what it drew
ROUTED = ("moe", "mla")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe-v", "hanayo", "auto")
SPARSE = {
    "top": mk.strategy.BlockTopK(block=3, top=2),
    "slash": mk.strategy.VerticalSlash(block=2, vertical=2, slash=2, queries=3),
}
GROUPS = ("by_length", "flexsp", "bytescale", "zeppelin")
SPLITS_BACKWARD = ("zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe-v", "auto")

# What is drawn whatever the model and the mesh are. The first is the plain choice.
CHOICES: dict[str, tuple[object, ...]] = {
    "sizes": ("even", "uneven"),
    "sequence": (False, True),
    "context": ("auto", "ring", "all_gather", "group_cast", "ulysses"),
    "zero": (3, 1, 2),
    "recompute": ("none", "full", "selective", "activation", "budget"),
    "offload": ("none", "host", "disk"),
    "regather": (False, True),
    "mlp_chunks": (1, 3),
    "loss": ("logits", "chunked"),
    "precision": ("fp64", "fp32", "bf16"),
    "optimizer": ("device", "host"),
    "microbatches": (1, 2, 3),
    "packing": (False, True),
    "masked": (False, True),  # the first rows have no label: some ranks, or microbatches, have nothing to learn from
}


@cache
def _parse(mesh: str) -> mk.MeshSpec:
    return mk.MeshSpec.parse(mesh)


@dataclass(frozen=True, kw_only=True)
class Cell:
    model: str = "dense"
    mesh: str = "dp_shard=1"
    schedule: str = "1f1b"
    resume: str = ""  # after two steps: saved, and gone on from there on this mesh
    sizes: str = "even"
    sequence: bool = False
    context: str = "auto"
    groups: str = "fixed"  # of cp; others are drawn by `draw_grouped` alone
    node: int = 8  # of double_ring, drawn by `draw_double_ring` alone
    sparse: str = ""  # of `SPARSE`, drawn by `draw_sparse` alone
    zero: int = 3
    recompute: str = "none"
    offload: str = "none"
    regather: bool = False
    mlp_chunks: int = 1
    loss: str = "logits"
    precision: str = "fp64"
    optimizer: str = "device"
    microbatches: int = 1
    packing: bool = False
    masked: bool = False
    max_rows: int | None = None  # drawn by `draw_padded` alone, so that a seed draws what it drew
    gather: str = ""  # quantized wires, drawn by `draw_wired` alone
    reduce: str = ""
    feedback: bool = True
    row: tuple[str, ...] = ()  # of the table of shardings, in place of zero, drawn by `draw_sharded` alone
    resume_row: tuple[str, ...] = ()

    @property
    def spec(self) -> mk.MeshSpec:
        return _parse(self.mesh)

    @property
    def layers(self) -> int:
        pp = max(self.spec.pp, _parse(self.resume).pp if self.resume else 1)
        return max(2, 2 * pp + (self.sizes == "uneven"))

    def __str__(self) -> str:
        """What is not the default, as a call that makes it again."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Cell({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    def features(self) -> frozenset[str]:
        """What the support page counts: axes, models and ways to save, each by one name."""
        spec = self.spec
        found = {
            axis for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp") if getattr(spec, axis) > 1
        }
        zero = 1 if spec.pp > 1 else self.zero  # many microbatches are in flight between gathering and reducing
        found |= {f"model: {self.model}", self.precision} | ({"nodes"} if spec.dp_intra > 1 else set())
        parts = ("parameters", "gradients", "states")
        found |= {f"{part}: {level}" for part, level in zip(parts, self.row, strict=False)} or {f"zero {zero}"}
        found |= {"sequence"} if self.sequence and spec.tp > 1 else set()
        how = self.sparse or (self.context if self.groups == "fixed" else self.groups)
        found |= {f"cp: {how}"} if spec.cp > 1 or self.sparse else set()
        found |= {f"pp: {self.schedule}"} if spec.pp > 1 else set()
        found |= {f"recompute: {self.recompute}"} if self.recompute != "none" else set()
        found |= {f"offload: {self.offload}"} if self.offload != "none" else set()
        found |= {"regather"} if self.regather and "sequence" in found else set()
        found |= {"mlp chunks"} if self.mlp_chunks > 1 else set()
        found |= {"chunked loss"} if self.loss == "chunked" else set()
        found |= {"optimizer on the host"} if self.optimizer == "host" else set()
        found |= {"accumulation"} if self.microbatches > 1 else set()
        found |= {"packing"} if self.packing else set()
        found |= {"rows without labels"} if self.masked else set()
        found |= {"padded rows of experts"} if self.max_rows is not None else set()
        found |= {f"gather: {self.gather}"} if self.gather else set()
        found |= {f"reduce: {self.reduce}, {'with' if self.feedback else 'without'} feedback"} if self.reduce else set()
        found |= {"uneven sizes"} if self.sizes == "uneven" else set()
        if self.resume:
            found |= {"resume" if _parse(self.resume) == spec else "resume on another mesh"}
        return frozenset(found)

    def refusals(self) -> list[Refusal]:
        """Why the plan must be refused, here or on the mesh that goes on."""
        features = self.features()
        found = [refusal for refusal in REFUSALS if {refusal.one, refusal.other} <= features]
        if self.resume and self.resume != self.mesh:
            told = {**vars(self), "mesh": self.resume, "schedule": "1f1b", "resume": "", "row": self.resume_row}
            found += Cell(**told).refusals()
        return found


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Two features that a plan may not have together. match: in the error; reason: on the support page."""

    one: str
    other: str
    match: str
    reason: str


REFUSALS = [
    *(
        Refusal(
            one="recompute: budget",
            other=f"model: {model}",
            match="what routed experts keep depends on where tokens go",
            reason="what routed experts keep depends on where tokens go, which no budget can know",
        )
        for model in ROUTED
    ),
    *(
        Refusal(
            one="mlp chunks",
            other=f"recompute: {mode}",
            match=r"mlp_chunks=3 with recompute=",
            reason="it would keep the intermediates that chunks exist to free",
        )
        for mode in ("selective", "activation", "budget")
    ),
    *(
        Refusal(
            one="mlp chunks",
            other=f"pp: {schedule}",
            match="mlp_chunks=3 with a schedule that computes weight gradients apart",
            reason="weight gradients computed apart keep the intermediates of every chunk until then",
        )
        for schedule in SPLITS_BACKWARD
    ),
    Refusal(
        one="mlp chunks",
        other="model: mlp",
        match="the plan names no feed-forwards",
        reason="`auto_plan` names no feed-forwards in a model nobody has seen",
    ),
    Refusal(
        one="chunked loss",
        other="model: mlp",
        match="no head in OwnModel",
        reason="`auto_plan` names no head in a model nobody has seen",
    ),
    Refusal(
        one="sequence",
        other="model: mlp",
        match="the plan cuts them nowhere",
        reason="`auto_plan` does not know where hidden states of a model nobody has seen begin",
    ),
    *(
        Refusal(
            one="recompute: activation",
            other=f"model: {model}",
            match="has no feed-forward with the steps",
            reason="the feed-forward has no steps of its own to run again",
        )
        for model in ("mlp", "transformers")
    ),
]


PADDED_ROWS = (990, 1024)  # the most that a rank can have: 5 rows of 18 tokens, of which each chooses all of 11 experts

# What was refused when the cells that have passed were drawn. It is tried by name, so that a seed draws what it drew.
UNDRAWN = frozenset({"cp", "model: mlp"})


def smallest(*features: str) -> Cell:
    """The plainest cell with these features, of those that `REFUSALS` name."""
    told: dict[str, object] = {}
    for feature in features:
        kind, _, value = feature.partition(": ")
        if kind == "pp":
            told |= {"mesh": "pp=2", "schedule": value}
        elif value:
            told[kind] = value
        else:
            told |= {
                "mlp chunks": {"mlp_chunks": 3},
                "chunked loss": {"loss": "chunked"},
                "sequence": {"mesh": "tp=2", "sequence": True},
                "cp": {"mesh": "cp=2"},
            }[kind]
    return Cell(**told)  # type: ignore[arg-type]


@cache
def meshes(ranks: int) -> list[str]:
    """Every way to share so many ranks among the axes of the dense view, without folding."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

    def ways(left: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (left,)
            return
        for size in range(1, left + 1):
            if left % size == 0:
                yield from ((size, *rest) for rest in ways(left // size, count - 1))

    return [
        " ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True) if size > 1) or "dp_shard=1"
        for sizes in ways(ranks, len(axes))
    ]


@cache
def foldings(mesh: str) -> list[str]:
    """The same mesh with every ep and etp that fit in it."""
    spec = _parse(mesh)
    inside = spec.dp_shard * spec.cp * spec.tp
    return [
        f"{mesh} {folded}".strip()
        for ep in range(1, inside + 1)
        for etp in range(1, inside + 1)
        if inside % (ep * etp) == 0
        for folded in [" ".join(f"{name}={size}" for name, size in (("ep", ep), ("etp", etp)) if size > 1)]
    ]


def draw(seed: int, ranks: int) -> Cell:
    """A cell on so many ranks, a function of the seed. One in twelve may be one that is refused; see `refusals`."""
    rng = random.Random(f"{seed} {ranks}")
    whatever = rng.random() < 1 / 12
    while True:
        cell = _draw(rng, ranks)
        if whatever or not (cell.refusals() or cell.features() >= UNDRAWN):
            return cell


def draw_padded(seed: int, ranks: int) -> Cell:
    """A cell on two or more ranks, of which groups exchange rows of experts, padded; none that is refused."""
    rng = random.Random(f"padded {seed} {ranks}")
    while True:
        cell = _draw(rng, ranks)
        if cell.spec.ep * cell.spec.etp > 1 and not cell.refusals():
            return replace(cell, max_rows=rng.choice(PADDED_ROWS))


def draw_hybrid(seed: int, ranks: int) -> Cell:
    """A cell of a hybrid decoder, on meshes whose tp divides the 8 key heads, or groups, of its mixers; none is refused."""
    rng = random.Random(f"hybrid {seed} {ranks}")
    while True:
        cell = _draw(rng, ranks)
        fits = all(8 % _parse(mesh).tp == 0 for mesh in (cell.mesh, cell.resume or cell.mesh))
        if cell.model == "dense" and fits and not cell.refusals():
            return replace(cell, model=rng.choice(MIXERS))


def draw_wired(seed: int, ranks: int) -> Cell:
    """A cell on two or more data ranks, between which parameters or gradients travel in a few bits; none that is refused."""
    rng = random.Random(f"wired {seed} {ranks}")
    while True:
        cell = _draw(rng, ranks)
        gather, reduce = rng.choice(("", "int8", "fp8", "int4")), rng.choice(("", "int8", "int4"))
        shards = cell.spec.dp_shard * cell.spec.cp
        sends = (gather and shards > 1) or (reduce and shards * cell.spec.dp_replicate > 1)
        if sends and not cell.refusals():
            feedback = not reduce or rng.random() < 0.75
            return replace(cell, gather=gather, reduce=reduce, feedback=feedback)


def draw_grouped(seed: int, ranks: int) -> Cell:
    """A cell on cp whose documents are shared out by their lengths; none that is refused."""
    rng = random.Random(f"grouped {seed} {ranks}")
    while True:
        cell = replace(_draw(rng, ranks), context="auto", groups=rng.choice(GROUPS))
        # The attention of "mlp" follows no documents, so it is refused.
        if cell.spec.cp > 1 and cell.model != "mlp" and not cell.refusals():
            return replace(cell, packing=rng.random() < 0.8)


def draw_sparse(seed: int, ranks: int) -> Cell:
    """A cell on cp whose attention sees chosen blocks; none that is refused. In fp64, for where scores of two blocks are
    alike to rounding another one is chosen."""
    rng = random.Random(f"sparse {seed} {ranks}")
    while True:
        cell = replace(_draw(rng, ranks), context="auto", precision="fp64", sparse=rng.choice(tuple(SPARSE)))
        # "mlp" has no attention, and one device of "transformers" takes no mask of ours.
        if cell.spec.cp > 1 and cell.model not in ("mlp", "transformers") and not cell.refusals():
            return replace(cell, packing=rng.random() < 0.5)


def draw_double_ring(seed: int, ranks: int) -> Cell:
    """A cell on cp whose keys go round in two levels; none that is refused."""
    rng = random.Random(f"double ring {seed} {ranks}")
    while True:
        cell = replace(_draw(rng, ranks), context="double_ring")
        sizes = {_parse(mesh).cp for mesh in (cell.mesh, cell.resume or cell.mesh)} - {1}
        nodes = [node for node in range(2, cell.spec.cp) if all(size % node == 0 for size in sizes)]
        if nodes and cell.model != "mlp" and not cell.refusals():
            return replace(cell, node=rng.choice(nodes))


def draw_sharded(seed: int, ranks: int) -> Cell:
    """A cell with several levels of data ranks, over which parameters, gradients and states lie; none that is refused."""
    rng = random.Random(f"sharded {seed} {ranks}")
    while True:
        cell = _draw(rng, ranks)
        mesh = _nested(rng, cell.mesh)
        other = mesh if cell.resume == cell.mesh else _nested(rng, cell.resume) if cell.resume else ""
        spec = _parse(mesh)
        sizes = {spec.dp_intra * spec.cp, spec.dp_shard * spec.cp, spec.dp_replicate * spec.dp_shard * spec.cp}
        if len(sizes - {1}) > 1 and not cell.refusals():
            row, after = _row(rng, mesh), _row(rng, other) if other else ()
            return replace(cell, mesh=mesh, resume=other, row=row, resume_row=row if other == mesh else after)


def _nested(rng: random.Random, mesh: str) -> str:
    """With nodes in dp_shard, of some number of ranks that holds whole sets of experts."""
    spec = _parse(mesh)
    sizes = [
        size
        for size in range(2, spec.dp_shard)
        if spec.dp_shard % size == 0 and size * spec.cp * spec.tp % (spec.ep * spec.etp) == 0
    ]
    return f"{mesh} dp_intra={rng.choice(sizes)}" if sizes else mesh


def _row(rng: random.Random, mesh: str) -> tuple[str, ...]:
    """One that the mesh has: with pp parameters and gradients stay whole."""
    spec = _parse(mesh)
    levels = ["none", *(["node"] if spec.dp_intra > 1 or spec.dp_shard == 1 else []), "all", "replicas"]
    states = rng.randrange(1, len(levels))
    most = 0 if spec.pp > 1 else states
    return levels[rng.randint(0, most)], levels[rng.randint(0, most)], levels[states]


def _draw(rng: random.Random, ranks: int) -> Cell:
    """Each choice is the plain one in half of the cells."""
    found: dict[str, object] = {
        name: values[0] if rng.random() < 0.4 else rng.choice(values) for name, values in CHOICES.items()
    }
    model = rng.choice(MODELS)
    mesh, other = rng.choice(meshes(ranks)), rng.choice(meshes(ranks))
    if model in ROUTED:
        mesh, other = rng.choice(foldings(mesh)), rng.choice(foldings(other))
    schedule = rng.choice(SCHEDULES) if _parse(mesh).pp > 1 else "1f1b"
    resume = rng.choice(["", mesh, other])
    return Cell(model=model, mesh=mesh, schedule=schedule, resume=resume, **found)  # type: ignore[arg-type]
