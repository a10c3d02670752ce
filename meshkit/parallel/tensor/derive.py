"""Deriving a plan on the tensor axis: candidates for each region of a model, of which the proof takes the first right one.

A region is a module that is called inside of a block, such as attention or a feed-forward. Candidates are what `auto_plan`
says by names, the model's own declared plan, and what the program shows: linear layers whose features only meet again in
another linear layer are columns, and that one is a row. What no candidate splits is computed whole, but its linear layers are
still held and multiplied by slices of their output features, which are then joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn
from torch.distributed.tensor import Shard

from meshkit.core.linear import is_linear, linear_shape
from meshkit.parallel.tensor.candidates import Candidates, candidates
from meshkit.parallel.tensor.layout import TensorLayout, tensor_layout
from meshkit.parallel.tensor.splits import Names, enclosing, likeness
from meshkit.plan import Plan, Style, column, head, match_table, replicate, sequence, split, vocab
from meshkit.plan.auto import by_patterns
from meshkit.plan.match import match_blocks
from meshkit.program import Example, Program, Unproved

Prove = Callable[[TensorLayout], None]


def derive_plan(program: Program, plan: Plan, example: Example, prove: Prove, *, size: int, sequence: bool) -> Plan:
    """The plan with as much split on an axis of `size` ranks as is proved.

    plan: by names, of `auto_plan`. prove: raises Unproved for a layout.
    Raises: Unproved where even the model with all regions whole is not proved; PlanError where it cannot be read.
    """
    first: Unproved | None = None
    # The sequence is split before the first block, as `auto_plan` says; or by the embedding, where blocks run twice, or what
    # the first is given is read again later.
    for splits in (True, False) if sequence else (True,):
        try:
            return _derived(_Tree(program, plan, example, size, sequence, splits), prove)
        except Unproved as error:
            first = first or error
    assert first is not None
    raise first


def _derived(tree: _Tree, prove: Prove) -> Plan:
    program, plan = tree.program, tree.plan
    while True:
        narrowed = replace(plan, tensor=by_patterns(tree.styles(), tree.modules))
        try:
            layout = tensor_layout(program.model, narrowed.tensor, size=tree.size, sequence=tree.sequence)
            prove(layout)
        except Unproved as error:
            if not tree.narrow(error):
                raise
        else:
            return replace(narrowed, notes=tuple(_notes(program, layout, tree)))


@dataclass
class _Tree:
    """The regions of a model, and of each kind of region how many of its candidates were not proved.

    splits: whether the first block that is called splits the sequence.
    """

    program: Program
    plan: Plan
    example: Example
    size: int
    sequence: bool
    splits: bool = True

    def __post_init__(self) -> None:
        self.modules = dict(self.program.model.named_modules(remove_duplicate=False))
        self.named = match_table(self.plan.tensor, self.modules, what="module")
        self.tried: dict[object, int] = {}
        self.why: dict[object, str] = {}
        blocks = match_blocks(self.plan.blocks, self.modules) or _longest_list(self.modules)
        # What the residual stream runs through: the model, blocks, and what is around them.
        stacks = (name for members in _lists(self.modules) for name in members)
        self.frames = {"", *(around for name in (*blocks, *stacks) for around in enclosing(name))}
        # Experts are shared over axes of their own. What is around them hands each token on, as a block does.
        self.experts = {name for name, style in self.named.items() if style.kind == "experts"}
        self.frames |= {around for name in self.experts for around in enclosing(name) if around != name}
        called = dict.fromkeys(call.name for call in self.program.read(self.example, {}).calls)
        self.first_block = next((name for name in called if name in set(blocks)), "") if self.splits else ""
        first = {id(module): name for name, module in self.program.modules.items()}
        # Further names of modules that stand in several places, which the program knows by their first.
        self.again = {name: first[id(child)] for name, child in self.modules.items() if first[id(child)] != name}
        self._options: dict[str, list[Names]] = {}

    @cached_property
    def _is_decoder(self) -> bool:
        """As `auto_plan` says."""
        return "vocab" in {style.kind for style in self.named.values()}

    @cached_property
    def _beside_experts(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.experts}

    @cached_property
    def _candidates(self) -> Candidates:
        return candidates(self.program, self.example, self.named, self.frames, size=self.size)

    def kind(self, name: str) -> object:
        """Equal for regions that are alike."""
        if name not in self._kinds:
            self._kinds[name] = likeness(name, self.modules[name])
        return self._kinds[name]

    @cached_property
    def _kinds(self) -> dict[str, object]:
        return {}

    # ------------------------------------------------------------------------------------------------------ styles

    def styles(self) -> Names:
        """The style of every module, by the candidates that are left."""
        styles: Names = {}
        self._add(styles, "", whole=False)
        for name, first in self.again.items():
            if first in styles and styles[first].kind != "split":
                styles[name] = styles[first]
        for owners in self._tied:
            # A module that keeps another's parameter beside it, as a head keeps the bias of the layer in it.
            if "rows" in {_rows(styles[name], key) for name, key in owners}:
                for name, key in owners:
                    if name in self._keepers and styles[name].kind in ("replicate", "sequence"):
                        styles[name] = replace(styles[name], columns=(*styles[name].columns, key))
        while apart := next((each for each in self._tied if len({_rows(styles[n], key) for n, key in each}) > 1), None):
            styles |= {name: replicate() for name, _ in apart}
        for name in self._candidates.read & styles.keys():
            if styles[name].kind in ("replicate", "sequence", "per_head"):
                styles[name] = replace(styles[name], outside=True)
        return styles

    @cached_property
    def _tied(self) -> list[list[tuple[str, str]]]:
        """(module, its name for it) of each parameter that several have, which has one layout."""
        owners: dict[int, list[tuple[str, str]]] = {}
        for name, param in self.program.model.named_parameters(remove_duplicate=False):
            module, _, key = name.rpartition(".")
            owners.setdefault(id(param), []).append((module, key))
        return [each for each in owners.values() if len(each) > 1]

    @cached_property
    def _keepers(self) -> set[str]:
        """Modules with parameters that some module inside of them has too."""
        return {name for each in self._tied for name, _ in each if any(n.startswith(f"{name}.") for n, _ in each)}

    def options(self, name: str) -> list[Names]:
        """Styles of the region with everything in it, best first; not that with all of it whole, which comes after them."""
        if name not in self._options:
            self._options[name] = list(self._candidates.regions.get(name, ()))
        return self._options[name]

    def _add(self, styles: Names, name: str, *, whole: bool) -> None:
        """whole: inside of a container that is computed whole."""
        if name in self.again:
            return
        if name in self.experts:
            styles[name] = self.named[name]
            return
        module, frame = self.modules[name], name in self.frames
        options, tried = self.options(name), self.tried.get(self.kind(name), 0)
        if tried < len(options):
            styles |= options[tried]
            if name == self.first_block and self._is_decoder:
                styles[name] = split()
            return
        left = tried - len(options)  # 0: as much as can be; 1: nothing of it
        own = any(True for _ in module.parameters(recurse=False))
        # Not `named_children`, which names a module that stands in two places once.
        children = [f"{name}.{key}" if name else key for key, child in module._modules.items() if child is not None]
        container = any(True for child in module.children() for _ in child.parameters())
        if name and name == self.first_block and self._is_decoder:
            styles[name] = split()
        elif own:
            styles[name] = self._of_leaf(name, module, whole, left) if not container else self._of_holder(frame, whole)
        elif container and not frame and not whole and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            styles[name] = replicate()
        inside = whole or styles.get(name) == replicate()
        for child in children:
            self._add(styles, child, whole=inside)

    def _of_holder(self, frame: bool, whole: bool) -> Style:
        """A module with parameters of its own and modules beside them."""
        return sequence() if frame and not whole else replicate()

    def _of_leaf(self, name: str, module: nn.Module, whole: bool, left: int) -> Style:
        by_name = self.named.get(name, replicate())
        shape = linear_shape(module)
        splits = shape is not None and "weight" in module._parameters and name in self._candidates.called
        leaf: list[Style] = []
        if name.rpartition(".")[0] in self._beside_experts:
            leaf.append(by_name)  # a router, which sees each token alone
        if isinstance(module, nn.Embedding) and not (module.max_norm or module.scale_grad_by_freq or module.sparse):
            leaf.append(vocab())
        elif splits and by_name.kind == "vocab":
            leaf.append(by_name)
        if splits and self.sequence and name in self._candidates.last:
            leaf.append(head())  # the model's output is all tokens
        elif splits and shape is not None and shape.out_features % self.size == 0:
            leaf.append(column(gather=True))
        elif shape is None and not isinstance(module, nn.Embedding) and not whole:
            leaf.append(sequence())
        leaf.append(replicate())
        return leaf[min(left, len(leaf) - 1)]

    # ------------------------------------------------------------------------------------------------------ narrowing

    def narrow(self, error: Unproved) -> bool:
        """Give up the candidate that an error is about; False where none is left."""
        for name in (error.module, error.before):
            for around in reversed(list(enclosing(name))):
                if self._give_up(around, error):
                    return True
        near = [name for name in self.modules if name.startswith(f"{error.module}.") or not error.module]
        regions = [name for name in self.modules if self.options(name)]
        return any(
            self._give_up_all(names, error)
            for names in ([name for name in near if name in regions], regions, near, list(self.modules))
        )

    def _give_up_all(self, names: Sequence[str], error: Unproved) -> bool:
        """The same for all of these, each kind once; False where none has anything left."""
        once = {self.kind(name): name for name in reversed(names) if self._left(name)}
        for kind, name in once.items():
            self.tried[kind] = max(
                self.tried.get(kind, 0) + 1, len(self.options(name))
            )  # whole, without further candidates
            self.why.setdefault(kind, str(error))
        return bool(once)

    def _give_up(self, name: str, error: Unproved) -> bool:
        """Whether the region had a candidate left."""
        if not self._left(name):
            return False
        kind = self.kind(name)
        self.tried[kind] = self.tried.get(kind, 0) + 1
        self.why.setdefault(kind, str(error))
        return True

    def _left(self, name: str) -> bool:
        """Whether the region has another candidate, and no region around it says what it is."""
        tried = self.tried.get(self.kind(name), 0)
        return self._is_used(name) and tried < len(self.options(name)) + self._leaves(name)

    def _leaves(self, name: str) -> int:
        """How often a module by itself can be narrowed."""
        module = self.modules[name]
        if any(True for _ in module.children()) or not any(True for _ in module.parameters(recurse=False)):
            return 0
        return 2 if is_linear(module) or isinstance(module, nn.Embedding) else 1

    def _is_used(self, name: str) -> bool:
        """Whether no region around it says what it is."""
        return all(
            self.tried.get(self.kind(around), 0) >= len(self.options(around))
            for around in enclosing(name)
            if around != name
        )


def _longest_list(modules: Mapping[str, nn.Module]) -> list[str]:
    """The members of the longest list of modules that have modules in them, as layers of several types are."""
    return max(_lists(modules), key=len, default=[])


def _lists(modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """The members of lists of modules that have modules in them, and that are in no other such list."""
    lists: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList) or not all(any(True for _ in member.children()) for member in module):
            continue
        if not any(name.startswith(f"{other}.") for other in lists):
            lists[name] = [f"{name}.{index}" for index in range(len(module))]
    return list(lists.values())


def _rows(style: Style, key: str) -> str:
    """Equal for styles that lay a parameter out alike: vocabularies and columns are split by rows."""
    return "rows" if style.kind in ("vocab", "column") or key in style.columns else style.kind


def share_of(program: Program, layout: TensorLayout, *, gathered: bool = False) -> float:
    """The share of the parameters' elements that the axis splits; gathered: of those, by column(gather=True) alone."""
    total = sum(param.numel() for param in program.parameters.values())
    split = sum(
        param.numel()
        for name, param in program.parameters.items()
        if name in layout.params
        and isinstance(layout.params[name].placement, Shard)
        and (not gathered or getattr(layout.styles.get(name.rpartition(".")[0]), "gather", False))
    )
    return split / total if total else 0.0


def _notes(program: Program, layout: TensorLayout, tree: _Tree) -> Iterator[str]:
    share = f"tp={layout.size} splits {share_of(program, layout):.1%} of the parameters"
    gathered = share_of(program, layout, gathered=True)
    # Less memory, but attention and norms between such layers run whole on every rank.
    yield share + f", {gathered:.1%} by column(gather=True), whose outputs every rank has whole" * bool(gathered)
    for kind, why in tree.why.items():
        name = next(name for name in tree.modules if tree.kind(name) == kind)
        yield f"{name} is not split otherwise: {why}"
