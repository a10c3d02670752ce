"""vLLM as the inference engine, with weight sync: each call loads the run's weights into vLLM, which then writes rollouts."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshkit.algos.rollout._engine import Reason, Sampling, Stopping, refuse_odd_calls
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.core.rng import stream_of
from meshkit.errors import PlanError
from meshkit.lora import lora_of
from meshkit.models import save_config, stream_pretrained
from meshkit.models.huggingface.config import ModelConfig
from meshkit.step import Run

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class VllmEngine:
    """Generation by vLLM (`pip install vllm`) with weights of `run`: engine(prompts, sampling=..., samples=..., seed=...).

    Each rank has a vLLM of its own in this process, with all weights of the model, and writes its share of the answers of
    its data rank; so N ranks are N engines, on any mesh. Each call first loads the run's present weights (weight sync).
    options: of vllm.LLM, such as gpu_memory_utilization=0.3, the share that training leaves free, and max_model_len;
    enforce_eager=True starts faster.
    Answers depend on the seed, the prompt's ids and key, and through the last bits of vLLM's kernels on the rest of a batch.
    So log-probabilities differ from training's more than those of `generate` do: correct for it (`PolicyLoss.corrections`),
    and look at `rollout_gap_max`. Stop strings are found afterwards: an answer is cut at the token that completes one.
    Memory: the whole model on each rank, and vLLM's cache. Wire: in each call one all-gather of every tensor, with pp also a
    broadcast, and the answers over tp, cp and pp.
    Raises: PlanError without vLLM, for a model that is not of meshkit.models or has adapters, and for filters (top_k, top_p,
    min_p) with a temperature other than 0 and 1, or where calls before had none: vLLM then gives no log-probabilities of the
    whole vocabulary. DataError as `generate`.
    """

    def __init__(self, run: Run, **options: Any) -> None:
        config: Any = getattr(run.full_model, "config", None)
        if lora_of(run.model) is not None or not isinstance(config, ModelConfig):
            raise PlanError(
                f"VllmEngine: {type(run.full_model).__name__} is not a plain model of meshkit.models, whose weights have "
                "names that vLLM reads. Call mk.lora.merge for one with adapters; else use generate()."
            )
        precision = run.resolved.memory.precision
        dtype = next(run.model.parameters()).dtype if precision is None else precision.compute
        if dtype not in DTYPES:
            raise PlanError(
                f"VllmEngine: vLLM computes in {', '.join(DTYPES.values())}, not in {dtype}. Use generate()."
            )
        self.refuse_absence()
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights are handed over
        import vllm  # type: ignore[import-not-found]  # no dependency, since it pins a torch version

        self.run, self._vllm, self._config = run, vllm, config
        self._options = {"dtype": DTYPES[dtype], "max_model_len": config.max_position_embeddings, **options}
        self._llm: Any = None
        self._mode = ""

    @staticmethod
    def refuse_absence() -> None:
        """For scripts that do other work first. Raises: PlanError without vLLM."""
        if importlib.util.find_spec("vllm") is None:
            raise PlanError("VllmEngine: vLLM is not installed. `pip install vllm`, or use generate().")

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        samples: int = 1,
        seed: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> list[Rollout]:
        """As `generate`. Collective."""
        stopping = Stopping(sampling, decode)
        refuse_odd_calls("VllmEngine", prompts, samples, self._config.vocab_size)
        self._start(sampling)
        # A generator: tensors are gathered one at a time, in the same order on all ranks, and freed once they are copied.
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream_pretrained(self.run.model)})
        self._llm.reset_prefix_cache()  # its keys and values are of the former weights
        requests = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        # The ranks of tp, cp and pp have the same prompts, and each has a whole model in vLLM: they share the requests out.
        engine, engines = self._engine_of_data_rank()
        share = range(engine, len(requests), engines)
        # By prompt and sample, not by engine: another mesh shares them out differently, and keeps their streams.
        streams = [stream_of("generate", seed, prompt.key, sample) for prompt, sample in requests]
        outputs = (
            self._llm.generate(
                [{"prompt_token_ids": requests[index][0].ids.tolist()} for index in share],
                [self._params(sampling, streams[index]) for index in share],
                use_tqdm=False,
            )
            if share
            else []
        )
        answers = self._gathered(
            {index: _answer(output, stopping) for index, output in zip(share, outputs, strict=True)}
        )
        return [
            Rollout(
                prompt_ids=prompt.ids,
                ids=ids,
                log_probs=log_probs,
                text=stopping.text(ids.tolist()),
                key=prompt.key,
                fields=prompt.fields,
                truncated=reason == "length",
            )
            for index, (prompt, _) in enumerate(requests)
            for ids, log_probs, reason in [answers[index]]
        ]

    def _start(self, sampling: Sampling) -> None:
        """Start vLLM at the first call, whose sampling decides the mode of its log-probabilities for good.

        They are of the raw logits, or of the processed ones, which vLLM takes after temperature and filters.
        """
        if sampling.filters and sampling.temperature not in (0, 1):
            raise PlanError(
                f"VllmEngine: with top_k, top_p or min_p the temperature must be 0 or 1, but is {sampling.temperature}: vLLM "
                "gives log-probabilities of all tokens without temperature, or of the tokens kept with it. Use generate()."
            )
        fits = {"raw_logprobs", "processed_logprobs"} if sampling.temperature == 0 else set()
        fits |= {"raw_logprobs"} if sampling.temperature == 1 else set()
        fits |= set() if sampling.filters else {"processed_logprobs"}
        if self._mode and self._mode not in fits:
            raise PlanError(
                f"VllmEngine: it was started for log-probabilities that {sampling} does not have. Make another engine for it."
            )
        if self._llm is not None:
            return
        self._mode = sorted(fits)[-1]  # raw ones where they fit
        with tempfile.TemporaryDirectory() as folder:
            # Untied: on a CPU, vLLM 0.32 packs the weight of a tied head once, and loading the embedding does not repack it.
            save_config(replace(self._config, tie_word_embeddings=False), Path(folder))
            self._llm = self._vllm.LLM(
                folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                distributed_executor_backend="external_launcher" if dist.get_world_size() > 1 else "uni",
                logprobs_mode=self._mode,
                seed=0,
                **self._options,
            )

    def _params(self, sampling: Sampling, stream: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # what ends an answer is in stop_ids
            seed=stream % 2**63,
            logprobs=0,
            detokenize=False,
        )

    def _engine_of_data_rank(self) -> tuple[int, int]:
        """(index, number) of this rank's engine among those of the data rank, which have the same prompts."""
        engine, engines = 0, 1
        for axis in ("pp", "cp", "tp"):
            view = self.run.mesh[axis]
            engine, engines = engine * view.size() + view.get_local_rank(), engines * view.size()
        return engine, engines

    def _gathered(self, answers: dict[int, Any]) -> dict[int, Any]:
        """The answers of all ranks of the data rank, by request. Wire: all-gathers over tp, cp and pp."""
        for axis in ("tp", "cp", "pp"):
            view = self.run.mesh[axis]
            if view.size() > 1:
                parts: list[dict[int, Any]] = [{}] * view.size()
                dist.all_gather_object(parts, answers, group=view.get_group())
                answers = {index: answer for part in parts for index, answer in part.items()}
        return answers


def _answer(request_output: Any, stopping: Stopping) -> tuple[np.ndarray, np.ndarray, Reason]:
    """(ids, log-probabilities, why it ended), cut where a stop string is complete."""
    (output,) = request_output.outputs
    ids = list(output.token_ids)
    log_probs = [step[id].logprob for id, step in zip(ids, output.logprobs, strict=True)]
    # vLLM was told no stop strings (detokenize=False): they are found here.
    length = next((end for end in range(1, len(ids) + 1) if stopping.reason(ids[:end]) is not None), len(ids))
    reason = stopping.reason(ids[:length]) or "length"  # vLLM ends at max_model_len, too
    return np.array(ids[:length], np.int64), np.array(log_probs[:length], np.float32), reason
