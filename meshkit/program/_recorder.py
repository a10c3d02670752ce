"""What records the operators and the calls of modules of one forward."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshkit.core import _torch, noting
from meshkit.core._torch import DataDependentOutputException, TorchDispatchMode, tree_map
from meshkit.program._backward import OF_ALL, HookedNode, hook_noted, kind_of, own_backward, saves_otherwise
from meshkit.program._copy import is_record
from meshkit.program._guess import Guess
from meshkit.program._lines import model_line
from meshkit.program._records import (
    OF_OUTPUT,
    RETURNED,
    Fold,
    ModuleCall,
    Operation,
    Storage,
    TensorRef,
    Trace,
    Unreadable,
    tensors,
)


class Recorder(TorchDispatchMode):
    """Records the operators that run inside, and the calls of the modules of `watching`."""

    def __init__(self, fold: Fold | None = None, guess: Guess | None = None) -> None:
        super().__init__()
        self._guess = guess
        if guess is not None:
            guess.begin()
        self._fold = fold or Fold()
        self.known: Mapping[int, Any] = {}  # the model's own parameters by id, of which it has copies
        self._returned: dict[str, Any] = {}  # by blocks that others are like
        self._operations: list[Operation] = []
        self._calls: list[ModuleCall] = []
        self._stack: list[int] = []
        self._sources: list[str] = []
        self._numbers: dict[tuple[int, torch.dtype], int] = {}
        self._nodes: dict[tuple[int, int], Any] = {}  # functions with a backward of their own, kept alive
        self._paused = False
        self._before: BaseException | None = None  # what was being handled already
        self._failed: str | None = None
        self._alive: list[Tensor] = []  # a storage that is freed would give its key to another
        self._inputs: dict[str, Any] = {}
        self._result: Any = None
        self._output: Any = None
        self._kept: dict[str, TensorRef] = {}
        self._assigned: dict[str, int] = {}
        self._asked = False
        self._differentiated: dict[str, str] = {}
        self._left: list[tuple[str, Any]] = []  # modules, and the nodes of the graph that made what they returned

    def anew(self) -> Recorder:
        """One for another call of the same model."""
        other = Recorder(self._fold, self._guess)
        other.known = self.known
        return other

    def name_storage(self, tensor: Tensor, source: str) -> int:
        # By dtype too: what looks at floats as complex numbers or as bytes is followed as another tensor.
        key = (_torch.storage_key(tensor), tensor.dtype)
        if key not in self._numbers:
            if source == "constant" and id(tensor) in self.known and self.known[id(tensor)]() is tensor:
                raise Unreadable(
                    f"{self._at()} at {model_line()}: it reaches a parameter {list(tensor.shape)} of the model by an object "
                    "that is no module, list, dict, method or closure, so what it does with it cannot be followed. Let a "
                    "module hold the module, or use dp axes only."
                )
            self._numbers[key] = len(self._sources)
            self._sources.append(source)
            self._alive.append(tensor)
        return self._numbers[key]

    def name_inputs(self, name: str, value: Any) -> None:
        for tensor in _torch.tree_leaves(value):
            if isinstance(tensor, Tensor):
                self.name_storage(tensor, f"input {name}")
        self._inputs[name] = self._refs(value, "input")
        if self._guess is not None:
            for ref in tensors(self._inputs[name]):
                self._guess.follow_input(ref)

    @property
    def failed(self) -> str:
        """The innermost module that raised."""
        return self._failed or ""

    def leave_out(self, model: nn.Module) -> None:
        """Let blocks return what others have returned."""
        for name, like in self._fold.left_out.items():
            model.get_submodule(name).__dict__["forward"] = lambda *args, _like=like, **kwargs: self._returned[_like]

    def trace(self) -> Trace:
        storages = tuple(_storage(source, tensor) for source, tensor in zip(self._sources, self._alive, strict=True))
        operations, calls = tuple(self._operations), tuple(self._calls)
        kept, assigned, differentiated = self._kept, self._assigned, self._differentiated
        return Trace(
            operations, calls, storages, self._inputs, self._result, kept, assigned, self._asked, differentiated
        )

    def keep(self, left: Mapping[str, Any]) -> None:
        """What modules keep, by name. See `Trace.kept`."""
        found = dict(left)
        for leaf in _torch.tree_leaves(self._output):
            if is_record(leaf):
                found |= {f"{OF_OUTPUT}{key}": value for key, value in vars(leaf).items()}
        for name, value in found.items():
            leaves = [leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, Tensor)]
            for number, leaf in enumerate(leaves):
                if leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                    self._see(leaf)
                    self._kept[name if len(leaves) == 1 else f"{name}[{number}]"] = self._ref(leaf, "constant")

    def note_assigned(self, buffers: Mapping[str, Tensor]) -> None:
        """Buffers that the call has put in the place of others. See `Trace.assigned`."""
        self._assigned = {name: self.name_storage(tensor, "constant") for name, tensor in buffers.items()}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        self._before = sys.exc_info()[1]
        handles = []
        token = noting.reader.set(self.note)
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._enter(name, module), with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            ]
        try:
            yield
        finally:
            noting.reader.reset(token)
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module) -> Callable[..., None]:
        own = [
            (f"{name}.{inside}".strip("."), owner._parameters, [*owner._parameters.items()])
            for inside, owner in module.named_modules()
            if owner._parameters
        ]

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            parent = self._stack[-1] if self._stack else -1
            args, kwargs = self._refs((args, kwargs), "constant")
            self._stack.append(len(self._calls))
            first = len(self._operations)
            swapped = next(
                (
                    f"{where}.{key}".lstrip(".")
                    for where, now, had in own
                    for key, param in had
                    if now.get(key) is not param
                ),
                None,
            )
            self._calls.append(ModuleCall(name, parent, args, kwargs, None, (first, first), swapped))

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._see(output)  # what the module itself changes in backward is its own
        call = self._calls[self._stack.pop()]
        self._left += [(call.name, node) for leaf in _torch.tree_leaves(output) if (node := _node(leaf)) is not None]
        error = sys.exc_info()[1]
        if error is not None and error is not self._before and self._failed is None:
            self._failed = call.name
        call.output = self._refs(output, "constant")
        if call.name in self._fold.kept:
            self._returned[call.name] = output
            self._operations.append(Operation(RETURNED, (call.output,), {}, None, self._stack[-1], "", True))
        if not self._stack:
            self._see(output)
            self._output = output
            self._result = self._refs(getattr(output, "logits", output), "constant")
        call.operations = (call.operations[0], len(self._operations))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := _torch.fake_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is torch.ops.aten.addmm.default and kwargs.get("beta", 1) == 1 and kwargs.get("alpha", 1) == 1:
            # A product and a sum, as the split model runs it that sums products over ranks before it adds the bias.
            product = self.__torch_dispatch__(torch.ops.aten.mm.default, types, args[1:])
            return self.__torch_dispatch__(torch.ops.aten.add.Tensor, types, (product, args[0]))
        self._see((args, kwargs))
        refs = self._refs((args, kwargs), "constant")
        if self._guess is not None:
            guessed = self._guess.of_operator(func, refs, model_line())
            if guessed is not None:
                return guessed
        with _own_draws() if func.namespace.endswith("c10d") else nullcontext():
            try:
                out = func(*args, **kwargs)
            except DataDependentOutputException:
                self._asked = True
                raise
        self._add(func, refs, out)
        return out

    def note(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of one of our own functions as one operation; see `noting`."""
        self._see((args, kwargs))
        refs = self._refs((args, kwargs), "constant")
        before, self._paused = self._paused, True
        token = noting.reader.set(None)
        try:
            out = function(*args, **kwargs)
            # Memory of its own: what is known of a tensor is kept by storage, and this step changes what is known.
            out = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, out)
        finally:
            self._paused = before
            noting.reader.reset(token)
        if not before:
            self._add(name, refs, out)
        return out

    def note_backward(self, name: str, inputs: Any, runs: Any, out: Any, reads: Sequence[Tensor] = ()) -> None:
        if not self._paused:
            name, met = self._met(name, out, reads)
            refs = self._refs(
                ([leaf for leaf in _torch.tree_leaves(inputs) if isinstance(leaf, Tensor)], out), "constant"
            )
            self._operations.append(
                Operation(name, (refs[0], runs, met), {}, refs[1], self._call(), model_line(), torch.is_grad_enabled())
            )

    def _met(self, name: str, out: Any, reads: Sequence[Tensor]) -> tuple[str, list[TensorRef]]:
        """What a backward of elements reads meets a gradient element by element, as in products with what is returned."""
        tensor: Tensor = next(leaf for leaf in _torch.tree_leaves(out) if isinstance(leaf, Tensor))
        met: list[TensorRef] = []
        for read in reads:
            before, self._paused = self._paused, True
            try:
                with torch.no_grad():
                    product = tensor * read
            except Exception:
                return OF_ALL, []
            finally:
                self._paused = before
            refs = self._refs((tensor, read), "constant")
            made = self._ref(product, f"op {len(self._operations)}")
            product_of = Operation(torch.ops.aten.mul.Tensor, refs, {}, made, self._call(), model_line(), False)
            self._operations.append(product_of)
            met.append(made)
        return name, met

    def _see(self, tree: Any) -> None:
        """Note the functions with a backward of their own that returned these tensors."""
        if self._paused:
            return
        for tensor in _torch.tree_leaves(tree):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad or (node := own_backward(tensor)) is None:
                continue
            ref = self._ref(tensor, "constant")
            if (id(node), ref.storage) not in self._nodes:
                self._nodes[id(node), ref.storage] = node
                before, self._paused = self._paused, True
                try:
                    name, runs, reads = kind_of(node)
                finally:
                    self._paused = before
                inputs = self._inputs_of(ref)
                name, met = self._met(name, tensor, reads)
                self._operations.append(Operation(name, (inputs, runs, met), {}, ref, self._call(), model_line(), True))

    def _inputs_of(self, ref: TensorRef) -> list[TensorRef]:
        """What a function that ran without autograd was given, as far as it requires gradients."""
        found, pending = [ref], {ref.storage}
        for operation in reversed(self._operations):
            if operation.grad_mode or not any(out.storage in pending for out in tensors(operation.outputs)):
                continue
            for each in tensors((operation.args, dict(operation.kwargs))):
                pending.add(each.storage)
                found += [each] if each.requires_grad else []
        return found

    def look_at_backward(self, roots: Sequence[Tensor], inputs: Sequence[Any]) -> None:
        """A backward that the forward runs."""
        if self._paused:
            return
        self._paused = True
        try:
            run, ends = _torch.nodes_run(roots, inputs)
        finally:
            self._paused = False
        running = self._calls[self._call()].name if self._stack else ""
        for name, node in self._left:
            # What the running module was given may be what another one returned: then nothing of that one runs.
            if node in run or (node in ends and (not running or name.startswith(f"{running}."))):
                self._differentiated.setdefault(name, model_line())

    def look(self, tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
        """A hook on a tensor's gradient."""
        before, self._paused = self._paused, True
        try:
            found = list[Any]()
            hook_noted(tensor, hook, lambda *noted: found.append(noted))
        finally:
            self._paused = before
        for noted in found:
            self.note_backward(*noted)

    def _call(self) -> int:
        return self._stack[-1] if self._stack else -1

    def _at(self) -> str:
        return (self._calls[self._call()].name if self._stack else "") or "the model"

    def _add(self, op: Any, refs: Any, out: Any) -> None:
        call = self._call()
        outputs = self._refs(out, f"op {len(self._operations)}")
        if self._guess is not None:
            self._guess.follow(op, refs, outputs, self._sources)
        self._operations.append(Operation(op, refs[0], refs[1], outputs, call, model_line(), torch.is_grad_enabled()))
        if torch.is_grad_enabled() and saves_otherwise():
            grads = [ref for ref in tensors(refs) if ref.requires_grad]
            made = [replace(ref, requires_grad=bool(grads)) for ref in tensors(outputs)]  # it has no graph yet
            if grads:
                self._operations.append(Operation(OF_ALL, (grads, None), {}, made, call, model_line(), True))

    def guessed(self, tensor: Tensor) -> Tensor | None:
        """One with guesses for values, which is to be read as a whole."""
        ref = self._ref(tensor, "constant")
        if self._guess is None or not self._guess.reads(ref):
            return None
        values = self._guess.of_tensor(ref.storage, ref.dtype, tensor.numel(), model_line())
        with _torch.without_modes():
            return torch.tensor(values, dtype=tensor.dtype).view(tensor.shape)

    def node_of(self, tensor: Tensor) -> Any:
        """What `tensor.grad_fn` is to the model."""
        node = _torch.graph_node(tensor)
        if node is None or self._paused:
            return node
        return HookedNode(node, lambda: self.note_backward(OF_ALL, (tensor,), None, tensor))

    def _refs(self, tree: Any, source: str) -> Any:
        if isinstance(tree, Tensor):
            return self._ref(tree, source)
        if type(tree) in (tuple, list):  # the arguments of most operators
            return type(tree)([self._refs(each, source) for each in tree])
        if type(tree) in _PLAIN or (type(tree) is dict and not tree):
            return tree
        return tree_map(lambda value: self._ref(value, source) if isinstance(value, Tensor) else value, tree)

    def _ref(self, tensor: Tensor, source: str) -> TensorRef:
        return TensorRef(
            self.name_storage(tensor, source),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
        )


_PLAIN = frozenset((int, float, bool, str, torch.dtype, type(None)))


def _node(leaf: Any) -> Any:
    return _torch.graph_node(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None


@contextmanager
def _own_draws() -> Iterator[None]:
    """torch numbers collectives without values by Python's random numbers; those are not draws of the model."""
    before = random.getstate()
    yield
    random.setstate(before)


class NoGuess(Exception):
    """What a closed module returns is no tensor like its first."""


# As it is before anything replaces it, as an estimate does.
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_AS_A_WHOLE = frozenset((Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__format__))
_GRAD_FN: Any = Tensor.grad_fn  # the attribute, of which a function mode sees the `__get__`


class Unfused(TorchFunctionMode):
    """A linear layer as a product and a sum, as a split layer runs it, which sums products over ranks before it adds the
    bias; and attention with a key for each query head.

    Raises: NoGuess where the forward takes the output of a closed module apart, as it would a tuple.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            if given.get("bias") is not None:
                return torch.nn.functional.linear(given["input"], given["weight"]) + given["bias"]
        if func is _ATTENTION and kwargs.get("enable_gqa"):
            query, key, value, *rest = args
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], dim=-3) for each in (key, value))
            return func(query, key, value, *rest, **{**kwargs, "enable_gqa": False})
        if func is Tensor.register_hook:
            self._recorder.look(args[0], args[1])
        if func == _GRAD_FN.__get__:
            return self._recorder.node_of(args[0])
        if func in _AS_A_WHOLE and (guessed := self._recorder.guessed(args[0])) is not None:
            with _torch.without_modes():
                return func(guessed, *args[1:], **kwargs)
        if func is Tensor.unbind and getattr(args[0], "_guessed", False):
            raise NoGuess
        return func(*args, **kwargs)


def _storage(source: str, tensor: Tensor) -> Storage:
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    value = None
    if source == "constant" and not _torch.is_fake(tensor) and not tensor.is_meta:
        value = torch.as_strided(tensor.detach(), (size,), (1,), 0).clone()
    return Storage(source, size, tuple(tensor.shape), value)
