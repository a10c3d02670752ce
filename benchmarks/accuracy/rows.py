"""A published row as what it says was run: a model on meta, a strategy, a batch, and the cluster it ran on."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

import meshkit as mk
from benchmarks.accuracy.gpt import GPT, GPT_PLAN, GPTConfig
from benchmarks.accuracy.moe import LAYERS, moe_model, moe_plan
from meshkit.cluster import Cluster
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline.schedules import interleaved
from meshkit.preflight.forecast import Batch
from meshkit.program import Program, read_program
from meshkit.strategy import MemoryPolicy, PipelinePolicy, Precision, Recompute, Strategy

TABLE = Path(__file__).parent / "published_runs.csv"
SCHEDULES = {"1F1B": "1f1b", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "ZB-2p*": "zb-h2", "ZB-V": "zbv", "": "1f1b"}
# Layers of table 6 of the zero-bubble papers, which it does not print: as the models of these names in their table 4.
HIDDEN = {"GPT-6.2B": (30, 4096), "GPT-14.6B": (46, 5120), "GPT-28.3B": (62, 6144)}
# Heads that a table does not print, by (source, hidden): its text has them.
HEADS = {("bloom_chronicles", 14400): 96}
PEAKS = {"A100": 312e12, "A800": 312e12, "H100": 989.4e12, "B200": 2250e12, "GB200": 2500e12, "GB300": 2500e12}


@dataclass(frozen=True, kw_only=True)
class Row:
    """gpu: of PEAKS. measured_s: of one optimizer step."""

    source: str
    label: str
    gpu: str
    network: str
    fields: dict[str, str]
    measured_s: float

    def number(self, name: str, default: int = 1) -> int:
        return int(float(self.fields[name])) if self.fields.get(name) else default

    @property
    def fp8(self) -> bool:
        return "fp8" in self.fields["precision"].lower()


def read_rows(path: Path = TABLE) -> Iterator[Row]:
    """Of steps that were timed."""
    with path.open(encoding="utf-8") as file:
        for fields in csv.DictReader(file):
            gpu = _gpu(fields["gpu"])
            if not fields["iter_time_s"] or gpu is None:
                continue
            yield Row(
                source=fields["source"],
                label=" ".join(f"{key}={fields[key]}" for key in ("model", "n_gpus", "dp", "tp", "pp", "micro_batch")),
                gpu=gpu,
                network=fields["gpu"],
                fields=fields,
                measured_s=float(fields["iter_time_s"]),
            )


def _gpu(text: str) -> str | None:
    found = re.search(r"GB300|GB200|B200|[hH]100|[aA]800|[aA]100", text)
    return found[0].upper() if found else None


# What was run


def strategy_of(row: Row) -> Strategy:
    fields = row.fields
    tp, pp, dp, cp = (row.number(axis) for axis in ("tp", "pp", "dp", "cp"))
    sharded = "FSDP1" in fields["note"] or re.search(r"FSDP=[1-9]", fields["note"])
    zero1 = "ZeRO-1" in fields["note"] or "DDP+dist-opt" in fields["note"] or "InternEvo" in fields["note"]
    mesh = MeshSpec(
        pp=pp, cp=cp, tp=tp, ep=row.number("ep"), **{"dp_shard" if sharded or zero1 else "dp_replicate": dp}
    )
    sequence = tp > 1 and ("SP" in fields["act_ckpt"] or not _is_gpt(row))
    stage = (3 if "FULL_SHARD" in fields["note"] or "FSDP=" in fields["note"] else 2) if sharded else 1
    return Strategy(
        mesh=mesh,
        plan=GPT_PLAN if _is_gpt(row) else moe_plan(fields["model"]),
        memory=MemoryPolicy(recompute=_recompute(fields["act_ckpt"]), precision=Precision()),
        zero=stage,
        sequence=sequence,
        pipeline=_pipeline(row, pp),
        microbatches=microbatches_of(row),
        # Megatron's, TransformerEngine's and llm-foundry's kernels fuse what torch.compile would.
        compile=True,
    )


def microbatches_of(row: Row) -> int:
    of_rank = row.number("global_batch") / row.number("dp")
    return max(1, round(of_rank / float(row.fields["micro_batch"])))


def batch_of(row: Row) -> Batch:
    return Batch(sequences=row.number("global_batch"), seq_len=row.number("seq_len"))


def _recompute(text: str) -> Recompute | str:
    if text.startswith("full"):
        return "full"
    return "selective" if text.startswith("selective") else "none"


def _pipeline(row: Row, pp: int) -> PipelinePolicy:
    if pp == 1:
        return PipelinePolicy()
    chunks, name = row.number("vpp"), row.fields["schedule"]
    layers = _layers(row)
    if name == "interleaved-1F1B" and chunks > 1:
        return PipelinePolicy(schedule=_interleaved(chunks), stages=_even(layers, pp * chunks))
    stages = pp * 2 if name == "ZB-V" else pp
    return PipelinePolicy(schedule=SCHEDULES[name if name in SCHEDULES else "1F1B"], stages=_even(layers, stages))


@cache
def _interleaved(chunks: int) -> partial:
    return partial(interleaved, chunks=chunks)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """As even as can be, the first and last stage with less, as the authors' embeddings and heads ask for."""
    each, rest = divmod(layers, stages)
    sizes = [each] * stages
    middle = sorted(range(stages), key=lambda stage: abs(stage - (stages - 1) / 2))
    for stage in middle[:rest]:
        sizes[stage] += 1
    return tuple(sizes)


def _layers(row: Row) -> int:
    if has_experts(row):
        return LAYERS[row.fields["model"]]
    if row.fields["layers"]:
        return row.number("layers")
    if row.fields["model"] in HIDDEN:
        return HIDDEN[row.fields["model"]][0]
    hidden, vocabulary = row.number("hidden"), row.number("vocab", 0)
    return round((float(row.fields["params_B"]) * 1e9 - vocabulary * hidden) / (12 * hidden**2))


def has_experts(row: Row) -> bool:
    return row.fields["model"] in LAYERS


def _is_gpt(row: Row) -> bool:
    return "llama" not in row.fields["model"].lower() and not has_experts(row)


def program_of(row: Row) -> Program:
    fields = row.fields
    if has_experts(row):
        return _moe(fields["model"])
    layers = _layers(row)
    hidden = row.number("hidden", 0) or HIDDEN[fields["model"]][1]
    vocabulary = row.number("vocab", 51200)
    vocabulary += -vocabulary % 128  # Megatron pads so
    if not _is_gpt(row):
        heads, kv_heads, ffn = (row.number(name) for name in ("heads", "kv_heads", "ffn"))
        return _llama(layers, hidden, heads, kv_heads, ffn, vocabulary)
    fused = row.source == "mosaicml_llmfoundry_bench"
    return _gpt(
        GPTConfig(
            layers=layers, hidden=hidden, heads=_heads(row, hidden), ffn=4 * hidden, vocab=vocabulary, fused=fused
        )
    )


def _heads(row: Row, hidden: int) -> int:
    """As printed, else heads of about 128 features that tp divides."""
    if row.fields["heads"]:
        return row.number("heads")
    if (row.source, hidden) in HEADS:
        return HEADS[row.source, hidden]
    return next(hidden // width for width in (128, 120, 112, 104, 144, 96, 64) if hidden % (8 * width) == 0)


@lru_cache(maxsize=4)
def _gpt(config: GPTConfig) -> Program:
    with torch.device("meta"):
        return read_program(GPT(config))


@lru_cache(maxsize=1)
def _moe(name: str) -> Program:
    return read_program(moe_model(name))


@lru_cache(maxsize=4)
def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int) -> Program:
    config = replace(
        mk.models.LLAMA3_8B,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        head_dim=hidden // heads,
    )
    with torch.device("meta"):
        return read_program(mk.models.Llama(config))


# Where it ran


# Host seconds of a kernel, with the Python around it: fitted, one number for each kind of trainer. A fused kernel of
# Megatron's stands for several operators of a module that the host walks through. BLOOM's host waited for each of them.
LAUNCH_S = {"megatron": 62e-6, "fsdp": 20e-6, "graphs": 5e-6, "blocking": 250e-6}


def _trainer(row: Row) -> str:
    if row.source.startswith(("megatron_bridge", "simumax")):
        return "graphs"  # CUDA graphs, or so large that the host is never seen
    if row.source.startswith("bloom"):
        return "blocking"  # its scripts set CUDA_LAUNCH_BLOCKING=1
    return "fsdp" if row.source.startswith("mosaicml") else "megatron"


def cluster_of(row: Row) -> Cluster:
    """The datasheet of its GPU, with the network and the trainer that its source states."""
    name = {"GB200": "b200", "GB300": "b200", "A800": "a100"}.get(row.gpu, row.gpu.lower())
    cluster = Cluster.read(name)
    if row.gpu in ("GB200", "GB300"):
        nvlink = replace(cluster.tiers[0], ranks=64)  # NVL72
        flops = {"bfloat16": PEAKS[row.gpu], "float16": PEAKS[row.gpu], "float8": 2 * PEAKS[row.gpu], "float32": 8e13}
        cluster = replace(
            cluster,
            tiers=(nvlink, *cluster.tiers[1:]),
            device=replace(cluster.device, flops_per_s=flops, memory_bytes_per_s=8e12),
        )
    if "40gb" in row.network:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes_per_s=1.555e12))
    if "OmniPath" in row.network:
        # Four of 100 Gb/s for eight ranks. Four GPUs are joined by NVLink, four links each, and the two fours by PCIe 4.
        nvlink, rail = cluster.tiers
        pcie = replace(nvlink, name="pcie", bytes_per_s=32e9, efficiency=0.78)
        cluster = replace(cluster, tiers=(replace(nvlink, ranks=4), pcie, replace(rail, bytes_per_s=6.25e9)))
    trainer = _trainer(row)
    device = replace(cluster.device, launch_s=LAUNCH_S[trainer], blocking=trainer == "blocking")
    return replace(cluster, device=device)
