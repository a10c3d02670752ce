"""`make accuracy`: forecasts of the published rows, their errors beside a naive predictor's, written to docs/accuracy.md."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.fit import Case, errors, forecast_s, held_out, naive_s, regret, scaled
from benchmarks.accuracy.rows import has_experts, read_rows
from benchmarks.accuracy.trace import profile_of
from meshkit.preflight.forecast import Profiles

PAGE = Path("docs/accuracy.md")
SOURCES = {
    "korthikanti22_table5": "Korthikanti et al. 2022, table 5",
    "mosaicml_llmfoundry_bench": "MosaicML llm-foundry, scripts/train/benchmarking",
    "zero_bubble_table4": "Qi et al. 2023, table 4",
    "zero_bubble_zbv_table6": "Qi et al. 2024, table 6",
    "bloom_chronicles": "BigScience, chronicles of 2022",
    "vtrain_ground_truth_single": "vTrain's repository, one node",
    "simumax_b200_v1.2": "SimuMax's repository, B200",
    "megatron_bridge_perf_25.11": "Megatron Bridge 25.11",
    "megatron_bridge_perf_25.09": "Megatron Bridge 25.09",
}

WORST = "bloom_chronicles"


def gpu_of(case: Case) -> object:
    """What has a number of its own: the GPU, and fp8 beside 16 bits."""
    return case.row.gpu, case.row.fp8


def same_training(case: Case) -> object:
    row = case.row
    return row.fields["model"], row.fields["n_gpus"], row.fields["global_batch"], row.fields["seq_len"]


def table(cases: Sequence[Case]) -> list[str]:
    said, naive = [forecast_s(case, lambda cluster: cluster) for case in cases], [naive_s(case) for case in cases]
    by_column = {
        "alone": said,
        "gpu": scaled(cases, said, gpu_of),
        "naive_gpu": scaled(cases, naive, gpu_of),
        "held_out": held_out(cases, said, gpu_of),
        "naive": naive,
    }
    lines = [
        "| source | rows | forecast, datasheet alone | signed | one number per GPU | naive "
        "| of other sources | one number per GPU and source | naive "
        "| Spearman | naive | regret, sets |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for source in [*dict.fromkeys(case.row.source for case in cases), None]:
        chosen = [index for index, case in enumerate(cases) if source in (case.row.source, None)]
        lines.append(_line(source, cases, chosen, by_column))
    return lines


def _without_worst(cases: Sequence[Case]) -> str:
    """Errors with one number per GPU of all other sources."""
    said = errors(cases, scaled(cases, [forecast_s(case, lambda cluster: cluster) for case in cases], gpu_of))
    naive = errors(cases, scaled(cases, list(map(naive_s, cases)), gpu_of))
    return f"{said.mean:.1%} with one number per GPU (naive {naive.mean:.1%})"


def _experts(cases: Sequence[Case]) -> str:
    """Errors of rows with experts, with one number per GPU of all rows."""
    chosen = [index for index, case in enumerate(cases) if has_experts(case.row)]
    of = [cases[index] for index in chosen]
    by_kind = [
        scaled(cases, [predict(case) for case in cases], gpu_of)
        for predict in (lambda case: forecast_s(case, lambda cluster: cluster), naive_s)
    ]
    said, naive = (errors(of, [values[index] for index in chosen]).mean for values in by_kind)
    return f"The {len(of)} rows with experts have a mean error of {said:.1%} (naive {naive:.1%})"


def _line(
    source: str | None, cases: Sequence[Case], chosen: Sequence[int], by_column: Mapping[str, Sequence[float]]
) -> str:
    of = [cases[index] for index in chosen]
    take = {name: [values[index] for index in chosen] for name, values in by_column.items()}

    def key(case: Case) -> object:
        return gpu_of(case), case.row.source

    alone, plain = errors(of, take["alone"]), errors(of, take["naive"])
    sets, lost = regret(of, take["alone"], same_training)
    cells = [
        "all" if source is None else SOURCES[source],
        str(alone.rows),
        f"{alone.mean:.1%}",
        f"{alone.signed:+.1%}",
        *(f"{errors(of, take[name]).mean:.1%}" for name in ("gpu", "naive_gpu", "held_out")),
        f"{errors(of, scaled(of, take['alone'], key)).mean:.1%}",
        f"{errors(of, scaled(of, take['naive'], key)).mean:.1%}",
        f"{alone.spearman:.3f}",
        f"{plain.spearman:.3f}",
        f"{lost:.1%}, {sets}" if sets else "-",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """With `kept`, only rows that are traced already."""
    kept = "kept" in sys.argv[1:]
    cases, refused, profiles = [], [], Profiles()
    for row in read_rows():
        profile = profile_of(row, profiles, kept=kept)
        if profile is None:
            continue
        if isinstance(profile, str):
            refused.append(f"{SOURCES[row.source]}, {row.label}: {profile.splitlines()[0]}")
        else:
            cases.append(Case(row=row, profile=profile))
    text = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    text = (
        text.replace("TABLE", "\n".join(table(cases)))
        .replace("ROWS", str(len(cases)))
        .replace("REFUSED", str(len(refused)))
        .replace("EXPERTS", _experts(cases))
        .replace("OTHERS", _without_worst([case for case in cases if case.row.source != WORST]))
    )
    PAGE.write_text(text, encoding="utf-8")
    print(text)
    print("\n".join(refused[:20]))


if __name__ == "__main__":
    main()
