"""Questions that all ranks ask, and that take seconds (is a forward right on parts?): the first that asks answers for all.

What the ranks of a job read is one program, so what one has found holds for all. On a host whose cores are fewer than its
ranks, each of them reading for itself takes as many times as long.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.hashing import hash64
from meshkit.core.waiting import waiting
from meshkit.errors import MeshkitError, PlanError, StepError

Answer = TypeVar("Answer")
LOOK_S = 0.5  # between two looks, at most
FIRST_S = 0.1
MOST = 1000  # questions that are told: a model that is read in each step would fill the store

# [Note: who asks what]
# No rank waits for one that does not ask: who comes first to a question answers it, and an answer needs no other rank. So
# ranks may ask other questions, or in another order, as they do with batches of their own shapes. A question names all that
# its answer depends on beside the model: the example's shapes, modes of the modules, numbers of rows. What cannot be named by
# text, an object among the arguments, makes a question that every rank answers for itself. Nothing is asked that runs the
# model on values: a model with collectives of its own needs all ranks for that. The first rank of the group has read the
# model before, in `resolve`, and has those readings: the others let it come first, for as long as a short reading takes.


class AskedOnce:
    """Wire: one broadcast of a name over the group. Each answer is up to some kilobytes in the store of the world, which
    hosts read."""

    def __init__(self, group: dist.ProcessGroup | None, model: nn.Module | None = None) -> None:
        """group: of ranks that ask alike; None where a rank is alone, and answers for itself. model: that is asked about; a
        rank whose modules have other attributes than those of the others answers for itself too."""
        self._store: Any = None
        self._asked = self._step = 0
        self._of = "" if model is None else f"{hash64(repr(_attributes(model))):x} "
        if group is None or group.size() == 1 or _torch.is_fake_group(group):
            return
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=group, group_src=0)
        self._name, self._patience = f"asked/{name[0]}", _torch.timeout_of(group)
        self._first = group.rank() == 0
        self._store = _connection()

    def ask(self, question: object, answer: Callable[[], Answer]) -> Answer:
        """What `answer` returns or raises, here or on the rank that asked first.

        question: what its `repr` is of; ranks that ask the same get the same.
        """
        text = repr(question)
        if self._store is None or " at 0x" in text or self._asked >= MOST:
            return answer()
        self._asked += 1
        key = f"{self._name}/{hash64(self._of + text):x}"
        if not self._first:
            self._comes(f"{key}/asked", FIRST_S)
        if self._store.add(f"{key}/asked", 1) > 1:
            told = self._wait(f"{key}/answer")
            if told is not None:
                return cast(Answer, _given(told))
            return answer()
        told = b""  # what cannot be told is answered by each
        try:
            found = answer()
            told = _packed((found, None))
        except MeshkitError as error:
            told = _packed((None, tellable(error)))
            self._store.set(self._refused, told)
            raise
        except Exception as error:
            told = _packed((None, MeshkitError(f"another rank raised {type(error).__name__}: {error}")))
            raise
        finally:
            self._store.set(f"{key}/answer", told)
        return found

    def begin_step(self) -> None:
        """Every rank calls it before each step: what one refuses from now is of that step."""
        self._step += 1

    def look(self) -> None:
        """Raises what another rank has refused in this step, in whose calls of the model that rank does not come."""
        if self._store is not None and self._store.check([self._refused]):
            _given(self._store.get(self._refused))

    @property
    def _refused(self) -> str:
        return f"{self._name}/refused/{self._step}"

    def _wait(self, key: str) -> bytes | None:
        if self._comes(key, self._patience.total_seconds()):
            return self._store.get(key) or None
        raise StepError(
            "another rank began to read the forward for all, and did not come to its end: it has ended, or stalls. Look at "
            "its screen; more time is init_mesh(timeout=...)."
        )

    def _comes(self, key: str, seconds: float) -> bool:
        """Whether a key is there within a time. Asked for now and then: a wait of the store that ends too soon is a warning
        of torch on the screen."""
        began = time.monotonic()
        with waiting("what another rank reads of the model"):
            while not self._store.check([key]):
                waited = time.monotonic() - began
                if waited >= seconds:
                    return False
                time.sleep(min(0.002 + waited / 10, LOOK_S))
        return True


def _connection() -> Any:
    """One for all runs of this world, beside its own, in which other threads wait."""
    world = _torch.world_store()
    if world not in _connections:
        _connections[world] = world.clone()
    return _connections[world]


_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def tellable(error: MeshkitError) -> MeshkitError:
    """An error that arrives: one made of other things than its text does not."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its own __init__ or __reduce__ raises
        return PlanError(str(error))
    return error


def shapes(tree: Any) -> list[object]:
    """Of arguments, what a question is of: their structure, tensors' shapes, strides and dtypes, and everything else."""
    leaves, spec = _torch.tree_flatten(tree)
    return [str(spec), *(_named(leaf) for leaf in leaves)]


def _attributes(model: nn.Module) -> list[object]:
    """The settings of modules: numbers, texts, and short lists and dicts of them."""
    return [
        (name, type(module).__qualname__, [(key, value) for key, value in vars(module).items() if _is_plain(value)])
        for name, module in model.named_modules()
    ]


def _is_plain(value: Any, deep: int = 2) -> bool:
    if isinstance(value, list | tuple | dict):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return deep > 0 and len(inside) <= _LONGEST and all(_is_plain(each, deep - 1) for each in inside)
    return isinstance(value, _PLAIN)


_LONGEST = 64
_PLAIN = (bool, int, float, complex, str, torch.dtype, type(None))


def _named(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, _PLAIN) else object()


def _packed(answer: tuple[Any, MeshkitError | None]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception:  # whatever an object inside of it raises
        return b""


def _given(told: bytes) -> Any:
    found, error = pickle.loads(told)
    if error is not None:
        raise error
    return found
