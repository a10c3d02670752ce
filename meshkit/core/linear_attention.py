"""Linear attention with decay (Mamba-2's SSD, gated linear attention, Gated DeltaNet): a chunked scan, as one operator.

Each head has a state S [K, V]. With the decay a = exp(log_decay) of a token, and beta where the delta rule is asked for,

    S = a S + k v'                         without beta
    S = a (I - beta k k') S + beta k v'    with beta
    output = S' q

Inside of a chunk that is products of all its pairs of tokens; between chunks the state goes on, one step a chunk. A chunk
changes the state by S -> A S + L: A is a number without beta, and a matrix [K, K] with it.
Dims: B batch, T tokens, N chunks, C tokens of a chunk, P pieces, G heads of q and k, H heads, K and V sizes of a head.
Source: Dao and Gu 2024, section 6 (SSD); Yang et al. 2024, "Gated Delta Networks", section 3.3 (the WY form).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshkit.core import _torch
from meshkit.core.attention_kernels import accumulator_dtype
from meshkit.core.custom_op import custom_op
from meshkit.core.document_chunks import Chunks, chunks_of, documents_in
from meshkit.core.double_backward import once_differentiable
from meshkit.mask import Interval

CHUNK = 64
"""tokens of a chunk, as in the kernels of flash-linear-attention and transformers"""

# [Note: backward computes forward again]
# Autograd through all chunks would keep [B, N, H, C, C] and the states of all chunks. The operator keeps its arguments, and
# its backward runs the chunks again under autograd, a layer at a time.


class ChunkedScan:
    """What chunks do to the state, and what they return, as functions of the state before them.

    transition A: [B, N, H] or [B, N, H, K, K]; added L: [B, N, H, K, V].
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, pieces: tuple[Interval, ...]
    ) -> None:
        dtype = accumulator_dtype(q.dtype)
        self.tokens, self.heads, self.dtype = q.shape[1], v.shape[2], q.dtype
        self.chunks = chunks_of(pieces, self.tokens, min(CHUNK, max(after - first for first, after in pieces)))
        self._index, self._places = self.chunks.index.on(q.device), self.chunks.places.on(q.device)
        repeat = self.heads // q.shape[2]
        q_BNHCK, k_BNHCK = (self._chunked(x.to(dtype)).repeat_interleave(repeat, 2) for x in (q, k))
        v_BNHCV = self._chunked(v.to(dtype))
        decay_BNHC = self._chunked(log_decay.to(dtype).unsqueeze(-1)).squeeze(-1).cumsum(-1)
        size = self.chunks.size
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        # Masked before exp: after it, what grows from an earlier token back would overflow.
        between = (decay_BNHC.unsqueeze(-1) - decay_BNHC.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
        last_BNH = decay_BNHC[..., -1]
        from_start, to_end = decay_BNHC.exp().unsqueeze(-1), (last_BNH.unsqueeze(-1) - decay_BNHC).exp().unsqueeze(-1)
        self._pairs = (q_BNHCK @ k_BNHCK.mT) * between
        self._q = q_BNHCK * from_start
        keys = (k_BNHCK * to_end).mT
        self._reads: Tensor | None = (
            None  # with beta: how much a token's value is changed by the state before the chunk
        )
        self._values = v_BNHCV
        self.transition = last_BNH.exp()
        if beta is not None:
            beta_BNHC1 = self._chunked(beta.to(dtype).unsqueeze(-1))
            lower = (beta_BNHC1 * (k_BNHCK @ k_BNHCK.mT) * between).tril(-1)
            both = torch.cat((v_BNHCV, k_BNHCK * from_start), -1) * beta_BNHC1
            # (I + lower)^-1 of both: what tokens of the chunk have changed in each other.
            solved = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True)
            self._values, self._reads = solved.split((v.shape[3], k.shape[3]), -1)
            eye = torch.eye(k.shape[3], dtype=dtype, device=q.device)
            self.transition = self.transition[..., None, None] * eye - keys @ self._reads
        self.added = keys @ self._values

    def zeros(self) -> Tensor:
        """[B, P, H, K, V]: the states before the pieces where documents begin."""
        return self.added.new_zeros((len(self.added), len(self.chunks.order), *self.added.shape[2:]))

    def states(self, start_BPHKV: Tensor) -> tuple[Tensor, Tensor]:
        """(the state before each chunk [B, N, H, K, V], after each piece [B, P, H, K, V]) from those before the pieces."""
        return _scan(self.chunks, self.transition, self.added, start_BPHKV)

    def products(self) -> Tensor:
        """The product of each piece's transitions, [B, P, H, 1, 1] or [B, P, H, K, K]."""
        shape = (len(self.added), len(self.chunks.order), self.heads)
        size = 1 if self._reads is None else self.added.shape[3]
        eye = torch.eye(size, dtype=self.added.dtype, device=self.added.device)
        return _scan(self.chunks, self.transition, None, eye.expand(*shape, size, size))[1]

    def output(self, states_BNHKV: Tensor) -> Tensor:
        """[B, T, H, V]; of a token of no piece zeros."""
        values = self._values if self._reads is None else self._values - self._reads @ states_BNHKV
        out = rearrange(self._q @ states_BNHKV + self._pairs @ values, "b n h c v -> b (n c) h v")
        return F.pad(out, (0, 0, 0, 0, 0, 1)).index_select(1, self._places).to(self.dtype)

    def _chunked(self, x_BTHD: Tensor) -> Tensor:
        padded = F.pad(x_BTHD, (0, 0, 0, 0, 0, 1)).index_select(1, self._index)
        return rearrange(padded, "b (n c) h d -> b n h c d", c=self.chunks.size)


def _scan(chunks: Chunks, transition: Tensor, added: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor]:
    before, ends = [], []
    state = torch.stack([start[:, number] for number in chunks.order], 1)
    for (first, count), following in zip(chunks.steps, (*chunks.steps[1:], (0, 0)), strict=True):
        before.append(state)
        a = transition[:, first : first + count]
        state = a @ state if a.ndim == state.ndim else a[..., None, None] * state
        if added is not None:
            state = state + added[:, first : first + count]
        ends.append(state[:, following[1] :])
        state = state[:, : following[1]]
    end = torch.cat(ends[::-1], 1)
    places = sorted(range(len(chunks.order)), key=chunks.order.__getitem__)
    return torch.cat(before, 1), torch.stack([end[:, place] for place in places], 1)


def scanned(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, pieces: tuple[Interval, ...]
) -> Tensor:
    """The output [B, T, H, V] of pieces that are whole documents; differentiable."""
    if not pieces or not v.numel():
        return torch.zeros_like(v) + sum(0 * each.sum() for each in (q, k, v, log_decay, beta) if each is not None)
    scan = ChunkedScan(q, k, v, log_decay, beta, pieces)
    return scan.output(scan.states(scan.zeros())[0])


# ------------------------------------------------------------------------------------------------- as an operator


def _fake(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, table: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@custom_op("linear_attention", fake=_fake)
def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, table: Tensor) -> Tensor:
    """q, k [B, T, G, K], v [B, T, H, V], log_decay and beta [B, T, H] -> [B, T, H, V]; head h reads q, k of h // (H/G).

    table: `mask_table` of packed causal documents of T tokens; without bands each row is one. The state is in fp32 (fp64 for
    fp64). log_decay is finite and at most 0.
    """
    return scanned(q, k, v, log_decay, beta, documents_in(table, q.shape[1]))


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, table: Tensor
) -> list[Tensor]:
    inputs = (q, k, v, log_decay) if beta is None else (q, k, v, log_decay, beta)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


@custom_op("linear_attention_backward", fake=_fake_backward)
def linear_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, table: Tensor
) -> list[Tensor]:
    """The mirror: gradients of q, k, v, log_decay and beta. See [Note: backward computes forward again]."""
    with _torch.graph_inside():
        inputs = leaves(q, k, v, log_decay, beta)
        out = scanned(*of_leaves(inputs), documents_in(table, q.shape[1]))
    return contiguous(torch.autograd.grad(out, inputs, dout))


def leaves(*tensors: Tensor | None) -> list[Tensor]:
    """New leaves of autograd of those that are given."""
    return [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]


def of_leaves(inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Of `leaves`: q, k, v, log_decay, and beta where there is one."""
    q, k, v, log_decay, *beta = inputs
    return q, k, v, log_decay, beta[0] if beta else None


def contiguous(grads: Any) -> list[Tensor]:
    """Each in memory of its own, as results of an operator are."""
    return [grad.clone(memory_format=torch.contiguous_format) for grad in grads]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable("the backward of linear attention is one operator.", "Use another mixer")
def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    grads = linear_attention_backward(dout, *ctx.saved_tensors)
    return (*grads, None) if len(grads) == 5 else (*grads, None, None)


linear_attention.register_autograd(_gradient, setup_context=_save)

# --------------------------------------------------------------------------- work, in operations of multiply-add (FLOPs)


def scan_flops(heads: int, key_size: int, value_size: int, *, delta: bool, chunk: int = CHUNK) -> int:
    """FLOPs of one token in forward: products of pairs in the chunk, and of the state; with the delta rule its system too.

    heads: H. A product of [m, k] and [k, n] is 2 m k n.
    """
    pairs = 2 * chunk * (key_size + value_size)
    state = 4 * key_size * value_size
    if delta:
        pairs += 2 * chunk * key_size + chunk * (key_size + value_size)  # k k', and the triangular solve
        # Reads of the state, the transition of the chunk, and its product with the state once a chunk.
        state += 2 * key_size * value_size + 2 * key_size * key_size + 2 * key_size * key_size * value_size // chunk
    return heads * (pairs + state)


@register_flop_formula(torch.ops.meshkit.linear_attention)  # type: ignore[untyped-decorator, unused-ignore]  # torch's
def _flops(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(v[0] * v[1] * scan_flops(v[2], q[3], v[3], delta=beta is not None))


@register_flop_formula(torch.ops.meshkit.linear_attention_backward)  # type: ignore[untyped-decorator, unused-ignore]  # torch's
def _flops_of_backward(
    dout: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, *rest: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Forward again, and twice for the gradients."""
    return int(3 * v[0] * v[1] * scan_flops(v[2], q[3], v[3], delta=beta is not None))
