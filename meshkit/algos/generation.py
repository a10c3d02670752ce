"""Continue a text with the model that is training, on its mesh. No cache: for a look at a model, not for serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshkit.collectives import all_reduce
from meshkit.errors import DataError
from meshkit.memory.linear_logits import LinearLogits
from meshkit.parallel.context import split_batch
from meshkit.parallel.data import after_inference
from meshkit.step import Run


@torch.no_grad()
def generate(
    run: Run,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """The prompt's ids and up to `new_tokens` more, the same on every rank; ends after `stop`. Greedy at temperature 0.

    context: the window the model is run on, padded on the right, so that its length never changes; with sequence
    parallelism a multiple of tp. Longer texts keep their last `context` ids.
    Every rank must call it. Wire: for each token, one forward pass and a broadcast of its id; with cp an all-reduce of the
    logits of one token as well.
    """
    if not prompt:
        raise DataError("generate: the prompt is empty. Begin with at least one id, for example the tokenizer's bos.")
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    training = run.model.training
    run.model.eval()
    for _ in range(new_tokens):
        window = ids[-context:]
        padded = torch.tensor([window + [0] * (context - len(window))], device=run.mesh.device)
        logits_V = _logits_of_token(run, padded, len(window) - 1)
        chosen = torch.zeros(1, dtype=torch.int64, device=run.mesh.device)
        if logits_V is not None:
            chosen.copy_(_choose(logits_V.float().cpu(), temperature, generator))
        dist.broadcast(chosen, src=_speaker(run))  # last bits may differ between ranks, and with them a choice
        ids.append(int(chosen))
        if ids[-1] == stop:
            break
    run.model.train(training)
    after_inference(run.model)
    return ids


def _speaker(run: Run) -> int:
    """The first rank that has the last stage."""
    stage_rank = 0 if run.pipeline is None else run.pipeline.cut.ends[1]
    return int(run.mesh.dense.mesh[stage_rank].flatten()[0])


def _logits_of_token(run: Run, ids_BT: torch.Tensor, token: int) -> torch.Tensor | None:
    """The logits [V] that follow one token of a row; None where another rank has the last stage.

    With cp only one rank has them: the others add zeros.
    """
    wanted_BT = torch.zeros_like(ids_BT)
    wanted_BT[0, token] = 1
    part = split_batch(run.model, {"input_ids": ids_BT, "wanted": wanted_BT})  # so each rank sees whether it is its own
    own_T = part.pop("wanted")[0]

    def following(model: Any, part: dict[str, Any]) -> torch.Tensor:
        output = model(**part)
        chosen = getattr(output, "logits", output)[0, int(own_T.argmax())]
        logits: torch.Tensor = chosen.to_logits() if isinstance(chosen, LinearLogits) else chosen
        return logits

    logits_V = run.infer(part, following)
    if logits_V is None:
        return None
    logits_V = logits_V.full_tensor() if isinstance(logits_V, DTensor) else logits_V
    return all_reduce(logits_V if own_T.any() else torch.zeros_like(logits_V), run.mesh["cp"])


def _choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits_V.argmax().reshape(1)
    return torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)
