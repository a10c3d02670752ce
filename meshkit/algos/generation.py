"""Continue a text with the model that is training, on its mesh. No cache: for a look at a model, not for serving."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshkit.errors import DataError
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
    Every rank must call it. Wire: for each token, one forward pass and a broadcast of its id.
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
        output = run.model(padded)
        logits = getattr(output, "logits", output)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        chosen = _choose(logits[0, len(window) - 1].float().cpu(), temperature, generator).to(run.mesh.device)
        dist.broadcast(chosen, src=0)  # last bits may differ between ranks, and with them a choice
        ids.append(int(chosen))
        if ids[-1] == stop:
            break
    run.model.train(training)
    after_inference(run.model)
    return ids


def _choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits_V.argmax().reshape(1)
    return torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)
