"""Dead code: operations of a trace whose results nothing reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshkit.program._records import Operation, Trace, tensors


def live(trace: Trace, result: Any = None, *, writes: bool = True) -> Trace:
    """The trace less operations that the output, and what is kept, do not depend on; or `result`.

    writes: what writes into memory stays, also where nobody reads that memory afterwards, as a cache's.
    """
    read = {ref.storage for ref in tensors((trace.output, dict(trace.kept)) if result is None else result)}
    kept: list[Operation] = []
    for operation in reversed(trace.operations):
        stays = writes and not isinstance(operation.op, str) and operation.op._schema.is_mutable
        if stays or any(ref.storage in read for ref in tensors(operation.outputs)):
            read |= {ref.storage for ref in tensors((operation.args, operation.kwargs))}
            kept.append(operation)
    return replace(trace, operations=tuple(reversed(kept)))
