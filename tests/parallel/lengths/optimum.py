"""The exact optimum of one microbatch of a few documents on a few ranks, as an integer programme (HiGHS)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from meshkit.parallel.lengths import LengthCosts


def optimum(lengths: Sequence[int], ranks: int, costs: LengthCosts, tokens_per_rank: int) -> float:
    """The least seconds of the slowest rank. Every document chooses an ordered set of ranks, and how many tokens each has,
    in parts of tokens too. All ranks are of one node.
    """
    orders = [order for count in range(1, ranks + 1) for order in permutations(range(ranks), count)]
    # Columns: the time, then for each (document, order) whether it is chosen, and the tokens of each of its ranks.
    columns, chosen, tokens = 1, {}, {}
    for document in range(len(lengths)):
        for order in orders:
            chosen[document, order], columns = columns, columns + 1
            for rank in order:
                tokens[document, order, rank], columns = columns, columns + 1
    rows: list[tuple[dict[int, float], float, float]] = []
    for document, length in enumerate(lengths):
        rows.append(({chosen[document, order]: 1.0 for order in orders}, 1.0, 1.0))
        for order in orders:
            all_tokens = {tokens[document, order, rank]: 1.0 for rank in order}
            rows.append(({**all_tokens, chosen[document, order]: -float(length)}, 0.0, 0.0))
    for rank in range(ranks):
        load: dict[int, float] = {0: -1.0}
        held: dict[int, float] = {}
        for (document, order, other), column in tokens.items():
            if rank not in order:
                continue
            length, me, at = lengths[document], order.index(rank), order.index(other)
            if other == rank:
                load[column] = costs.token_s + costs.pair_s * (length + 1) / 2
                held[column] = 1.0
            else:  # of those behind in the order all keys, of those before the ones of their first piece
                load[column] = costs.near_s * (1.0 if at > me else 0.5)
        rows += [(load, -np.inf, 0.0), (held, 0.0, float(tokens_per_rank))]
    matrix = lil_array((len(rows), columns))
    for index, (entries, _, _) in enumerate(rows):
        for column, value in entries.items():
            matrix[index, column] = value
    integral = np.zeros(columns)
    integral[list(chosen.values())] = 1
    found = milp(
        c=np.eye(1, columns)[0],
        constraints=LinearConstraint(matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows]),
        integrality=integral,
        bounds=Bounds(0, np.inf),
        options={"time_limit": 30, "mip_rel_gap": 1e-3},
    )
    assert found.x is not None, found.message
    return float(found.mip_dual_bound)
