"""Our own steps in a proof, on all ranks at once: collectives, a vocabulary's rows, attention over ranks, backwards."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch

from meshkit.program._backward import OF_ALL, OF_ELEMENTS
from meshkit.program._records import RETURNED, Operation, TensorRef, tensors
from meshkit.program._states import Kind, Unproved
from meshkit.program._walk import Step, Walk


def _replace(needs: Kind, gives: Kind, *, keep: Literal["all", "slice"]) -> Step:
    """The same tensor on every rank in; all of it, or the rank's slice of a dim out."""

    def step(proof: Walk, operations: Sequence[Operation]) -> None:
        proof.require_same(operations)
        for number, (rank, operation, source, out) in enumerate(proof.each(operations)):
            proof.require(rank, operation, source, needs)
            elements = rank.replay.elements(source)
            if keep == "slice":
                dim = operation.args[1]
                size = elements.shape[dim] // len(proof.ranks)
                elements = elements.narrow(dim, number * size, size)
            rank.define(out, elements, gives)

    return step


def _join(gives: Kind) -> Step:
    """Slices of a dim in, the full tensor out."""

    def step(proof: Walk, operations: Sequence[Operation]) -> None:
        parts = [rank.replay.elements(source) for rank, _, source, _ in proof.each(operations)]
        joined = torch.cat(parts, operations[0].args[1])
        for rank, operation, source, out in proof.each(operations):
            proof.require(rank, operation, source, "varying")
            rank.define(out, joined, gives)

    return step


def _lookup(proof: Walk, operations: Sequence[Operation]) -> None:
    """Rows of this rank's vocabulary, zeros for others: summands of the embedding."""
    full = proof.next(operations[0])
    if isinstance(full.op, str) or full.op.overloadpacket.__name__ != "embedding":
        raise Unproved(f"{proof.ranks[0].where(operations[0])}: the single-device model runs {full} there.")
    weight, ids = tensors(full.args)
    (result,) = tensors(full.outputs)
    proof.full.define(result)
    for rank, operation in zip(proof.ranks, operations, strict=True):
        own_weight, own_ids = tensors(operation.args)
        if not torch.equal(rank.replay.elements(own_ids), proof.full.elements(ids)):
            raise Unproved(f"{rank.where(operation)}: it looks up other ids than the single-device model.")
        if proof.slice(rank, weight, own_weight, rank.where(operation)).dim:
            raise Unproved(f"{rank.where(operation)}: it looks up a part that is no part of the vocabulary.")
        rank.define(tensors(operation.outputs)[0], proof.full.elements(result), "partial")


def _decode(proof: Walk, operations: Sequence[Operation]) -> None:
    """Codes of a quantized weight into numbers: of the rank's rows, or of its columns, which are whole blocks."""
    full = proof.next(operations[0])
    if full.name != operations[0].name:
        raise Unproved(f"{proof.ranks[0].where(operations[0])}: the single-device model runs {full} there.")
    (codes,), (result,) = tensors(full.args), tensors(full.outputs)
    proof.full.define(result)
    before = 0  # columns of the ranks before
    for rank, operation, source, out in proof.each(operations):
        part = proof.slice(rank, codes, source, rank.where(operation))
        elements = proof.full.elements(result)
        if part.indices is not None:
            columns = torch.arange(before, before + out.shape[1])
            elements = elements.index_select(part.dim, part.indices if part.dim == 0 else columns)
            before += out.shape[1]
        rank.define(out, elements, rank.kind(source))


def _logits(proof: Walk, operations: Sequence[Operation]) -> None:
    """Logits over this rank's vocabulary become a DTensor."""
    parts = [rank.replay.elements(source) for rank, _, source, _ in proof.each(operations)]
    joined = torch.cat(parts, -1)
    for rank, operation, source, out in proof.each(operations):
        proof.require(rank, operation, source, "varying")
        rank.define(out, joined, "distributed")


def _over_tokens(inputs_of_tokens: int, does: str) -> Step:
    """Attention, or a mixer, over all ranks: its first inputs are of this rank's tokens, [B, T, ...], others what all ranks
    have."""

    def step(proof: Walk, operations: Sequence[Operation]) -> None:
        full = proof.next(operations[0])
        if full.name != operations[0].name:
            raise Unproved(f"{proof.ranks[0].where(operations[0])}: the single-device model runs {full} there.")
        if proof.tokens is None:
            raise Unproved(f"{full}: this axis does not split tokens.")
        inputs, (result,) = tensors((full.args, full.kwargs)), tensors(full.outputs)
        proof.full.define(result)
        everything = proof.full.elements(result)
        for rank, operation, own in zip(proof.ranks, operations, proof.tokens, strict=True):
            where = rank.where(operation)
            theirs, mine = {**full.kwargs}, {**operation.kwargs}
            for name in theirs.keys() | mine.keys():
                a, b = theirs.get(name), mine.get(name)
                if not isinstance(a, TensorRef) and a != b:
                    raise Unproved(f"{where}: it {does} with {name}={b}, and the single-device model with {a}.")
            refs = tensors((operation.args, operation.kwargs))
            if len(refs) != len(inputs):
                raise Unproved(f"{where}: the single-device model {does} with other tensors.")
            parts = [proof.slice(rank, a, b, where) for a, b in zip(inputs, refs, strict=True)]
            if all(part.indices is None for part in parts):  # inside of what runs on all tokens
                for ref in refs:
                    if rank.needs_gradient(ref):
                        proof.require(rank, operation, ref, "replicated")
                rank.define(tensors(operation.outputs)[0], everything, "replicated")
                continue
            for index, (part, b) in enumerate(zip(parts, refs, strict=True)):
                if rank.kind(b) == "partial":
                    raise Unproved(f"{where}: it reads {b}, summands that were not summed over the ranks yet.")
                if part.indices is not None if index >= inputs_of_tokens else not proof.is_tokens(rank, part):
                    raise Unproved(f"{where}: it {does} with {b}, which is not of this rank's tokens.")
            rank.define(tensors(operation.outputs)[0], everything.index_select(1, own), "varying")

    return step


def _all_tokens(proof: Walk, operations: Sequence[Operation]) -> None:
    """Each rank's tokens in, all of them in their order out, read by ranks as they like."""
    assert proof.tokens is not None
    dim, order = operations[0].args[1], torch.cat(proof.tokens).argsort()
    constants = (rank.replay.constant(source) for rank, _, source, _ in proof.each(operations))
    known = [value for value in constants if value is not None]
    if len(known) == len(proof.ranks):
        of_all = torch.cat(known, dim).index_select(dim, order)
        for rank, _, _, out in proof.each(operations):
            rank.replay.define_constant(out, of_all)
        return
    parts = [rank.replay.elements(source) for rank, _, source, _ in proof.each(operations)]
    joined = torch.cat(parts, dim).index_select(dim, order)
    for rank, operation, source, out in proof.each(operations):
        if rank.needs_gradient(source):
            proof.require(rank, operation, source, "varying")
        rank.define(out, joined, "replicated")


def _own_tokens(proof: Walk, operations: Sequence[Operation]) -> None:
    """All tokens in, each rank's out: of the others it has no gradient."""
    assert proof.tokens is not None
    for rank, operation, own in zip(proof.ranks, operations, proof.tokens, strict=True):
        (source,), (out,) = tensors(operation.args), tensors(operation.outputs)
        if (known := rank.replay.constant(source)) is not None:
            rank.replay.define_constant(out, known.index_select(operation.args[1], own))
            continue
        proof.require(rank, operation, source, "replicated")
        rank.define(out, rank.replay.elements(source).index_select(operation.args[1], own), "varying")


def _counted(proof: Walk, operations: Sequence[Operation]) -> None:
    """A router counts tokens, and sums losses over them: where ranks' counts are summed, each token is one rank's, else all
    ranks have all."""
    full = proof.next(operations[0])
    if full.name != operations[0].name:
        raise Unproved(f"{proof.ranks[0].where(operations[0])}: the single-device model runs {full} there.")
    (theirs,), (result,) = tensors(full.args), tensors(full.outputs)
    proof.full.define(result, proof.full.elements(theirs))
    everything = proof.full.elements(theirs).flatten().sort().values
    parts = [rank.replay.elements(source).flatten() for rank, _, source, _ in proof.each(operations)]
    where = proof.ranks[0].where(operations[0])
    if proof.sums_counts:
        counted = torch.cat(parts).sort().values
        if not torch.equal(counted, everything):
            raise Unproved(f"{where}: a router counts its tokens, and ranks give it others than theirs, or the same.")
    elif any(not torch.equal(part.sort().values, everything) for part in parts):
        raise Unproved(f"{where}: a router counts its tokens, and a rank gives it a part of them.")
    for rank, operation, source, out in proof.each(operations):
        if rank.kind(source) == "partial":
            raise Unproved(f"{rank.where(operation)}: it counts by {source}, summands that were not summed yet.")
        rank.define(out, rank.replay.elements(source), rank.kind(source))


def _own_positions(proof: Walk, operations: Sequence[Operation]) -> None:
    """Constants: their values are in the trace."""


def _sum_tokens(proof: Walk, operations: Sequence[Operation]) -> None:
    """Sums or means over the tokens of all ranks, read by ranks as they like."""
    full = proof.next(operations[0])
    if full.name not in ("aten.mean.dim", "aten.sum.dim_IntList"):
        raise Unproved(f"{proof.ranks[0].where(operations[0])}: the single-device model runs {full} there.")
    (result,) = tensors(full.outputs)
    (theirs,) = tensors(full.args)
    proof.full.define(result)
    for rank, operation, source, out in proof.each(operations):
        where = rank.where(operation)
        _, dim, keepdim, mean, *_ = operation.args
        dims = full.args[1] if len(full.args) > 1 else None
        ndim = len(source.shape)
        same = (
            full.name == ("aten.mean.dim" if mean else "aten.sum.dim_IntList")
            and isinstance(dims, list)
            and [each % ndim for each in dims] == [dim % ndim]
            and (full.args[2] if len(full.args) > 2 else False) == keepdim
            and not full.kwargs
        )
        if not same:
            raise Unproved(f"{where}: the single-device model runs {full} there.")
        if rank.needs_gradient(source):
            proof.require(rank, operation, source, "varying")
        if not proof.is_tokens(rank, proof.slice(rank, theirs, source, where), dim % ndim):
            raise Unproved(f"{where}: it sums {source}, which is not of this rank's tokens.")
        rank.define(out, proof.full.elements(result), "replicated")


def _own_backward(proof: Walk, operations: Sequence[Operation]) -> None:
    """What a model's own backward changes: gradients that are whole; of parts only if element by element."""
    full = proof.next(operations[0])
    for rank, operation in zip(proof.ranks, operations, strict=True):
        where = rank.where(operation)
        if full.name != operation.name or full.args[1] != operation.args[1]:
            raise Unproved(f"{where}: the single-device model has another backward there.")
        for ref in (*tensors(operation.args), *tensors(operation.outputs)):
            kind = rank.kind(ref)
            if rank.needs_gradient(ref) and kind not in (
                ("invariant", "varying") if full.op == OF_ELEMENTS else ("invariant",)
            ):
                parts = "parts" if kind == "varying" else "summands"
                raise Unproved(
                    f"{where}: a hook, or a backward that the model writes itself, reads a gradient of which ranks have "
                    f"{parts}.",
                    wrong=False,
                )


def _returned(proof: Walk, operations: Sequence[Operation]) -> None:
    returned = proof.next(operations[0])
    if returned.name != operations[0].name:
        raise Unproved(f"{proof.ranks[0].where(operations[0])}: the single-device model runs {returned} there.")
    full = tensors(returned.args)
    states: list[Hashable] = []
    for rank, operation in zip(proof.ranks, operations, strict=True):
        own, where = tensors(operation.args), rank.where(operation)
        states += [proof.state(rank, a, b, where) for a, b in zip(full, own, strict=True)]
    proof.returned.append(tuple(states))


STEPS: dict[str, Step] = {
    "copy_to_axis": _replace("invariant", "replicated", keep="all"),
    "reduce_from_axis": _replace("partial", "invariant", keep="all"),
    "scatter_sum_dim": _replace("partial", "varying", keep="slice"),
    "split_dim": _replace("invariant", "varying", keep="slice"),
    "gather_dim": _join("replicated"),
    "join_dim": _join("invariant"),
    "vocab_lookup": _lookup,
    "sharded_logits": _logits,
    "context_attend": _over_tokens(3, "attends"),
    "context_scan": _over_tokens(5, "scans"),
    "context_convolve": _over_tokens(1, "convolves"),
    "gather_tokens": _all_tokens,
    "own_tokens": _own_tokens,
    "counted": _counted,
    "own_positions": _own_positions,
    "sum_tokens": _sum_tokens,
    "meshkit.decode_few_bits.default": _decode,
    RETURNED: _returned,
    OF_ELEMENTS: _own_backward,
    OF_ALL: _own_backward,
}
