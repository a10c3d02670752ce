"""The call of a `StreamFlow` that writes rollouts by a resumable generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshkit.algos.dataflow._call import SOURCE, Sample, to_arrays, to_tensors
from meshkit.algos.dataflow._rl import PROMPTED, SIGNED
from meshkit.algos.dataflow._stream_call import StreamCall
from meshkit.algos.rollout import CachePolicy, Generation, Sampling, encode_prompts
from meshkit.data import Record, Tokenizer
from meshkit.step import Run

STREAMED = (*SIGNED, "versions")


def generation_call(
    run: Run | None,
    tokenizer: Tokenizer,
    *,
    on: str,
    sampling: Sampling,
    samples: int,
    seed: int,
    tokens: int = 8,
    cache: CachePolicy | None = None,
    routing: bool = False,
    fingerprints: bool = False,
) -> StreamCall:
    """The call that writes `samples` rollouts of each prompt, with the `versions` of the weights by token.

    run: None on ranks outside of its mesh. tokens: between two looks at what training does; weights may arrive there.
    cache: its `max_sequences` is how many answers a data rank writes at the same time; a prompt begins when there is room
    for all its answers, so by the newest weights. routing, fingerprints: see `generate`. Wire: that of `Generation`.
    """
    writer = None
    if run is not None:
        policy = cache or CachePolicy()
        options: dict[str, Any] = {"decode": tokenizer.decode, "cache": policy}
        generation = Generation(run, sampling=sampling, routing=routing, fingerprints=fingerprints, **options)
        writer = GenerationWriter(generation, tokenizer, samples, seed, tokens, policy.max_sequences)
    return StreamCall(name="write", on=on, writer=writer, needs=PROMPTED, gives=STREAMED)


class GenerationWriter:
    """See `StreamWriter`."""

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, samples: int, seed: int, tokens: int, sequences: int
    ) -> None:
        self._generation, self._tokenizer = generation, tokenizer
        self._samples, self._seed, self._tokens, self._sequences = samples, seed, tokens, sequences
        self._begun: dict[int, Sample] = {}
        self._ended: dict[int, list[Sample]] = {}

    @property
    def busy(self) -> bool:
        return not self._generation.done

    @property
    def room(self) -> int:
        free = (self._sequences - self._generation.growing) // self._samples
        return max(free, int(not self._generation.growing))

    def begin(self, samples: Sequence[Sample]) -> None:
        rows = [(each["key"], Record(fields=each["fields"], source=f"prompt {each['key']}")) for each in samples]
        self._begun.update({each["key"]: each for each in samples})
        self._generation.add(encode_prompts(rows, self._tokenizer), samples=self._samples, seed=self._seed)

    def advance(self) -> list[list[Sample]]:
        for rollout in self._generation.advance(self._tokens):
            made = {name: getattr(rollout, name) for name in STREAMED}
            self._ended.setdefault(rollout.key, []).append({**self._begun[rollout.key], **made})
        whole = [key for key, made in self._ended.items() if len(made) == self._samples]
        for key in whole:
            del self._begun[key]
        return [self._ended.pop(key) for key in whole]

    def take_weights(self, version: int) -> None:
        self._generation.take_weights(version)

    def state_dict(self) -> dict[str, Any]:
        state = self._generation.state_dict()
        return {
            "version": state["version"],
            "parts": [
                {
                    SOURCE: sample[SOURCE],
                    "sample": to_tensors(sample),
                    "ended": [to_tensors(each) for each in self._ended.get(key, [])],
                    "open": [answer for answer in state["answers"] if answer["key"] == key],
                }
                for key, sample in self._begun.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        answers = []
        for part in state["parts"]:
            sample = to_arrays(part["sample"])
            self._begun[sample["key"]] = sample
            if part["ended"]:
                self._ended[sample["key"]] = [to_arrays(each) for each in part["ended"]]
            answers += part["open"]
        self._generation.load_state_dict({"version": state["version"], "answers": answers})
