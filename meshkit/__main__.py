"""Command line: train by a recipe or copy it, draw a pipeline schedule, estimate memory, forecast seconds, search strategies,
place the calls of reinforcement learning, explain a run before it starts, plan its energy and its checkpoints, measure a
cluster, read the last calls of a run, relay weights, write rollouts for a trainer elsewhere, verify those of others, or say
which replicas of local updates meet.

`meshkit` and `python -m meshkit` are the same; the name of a recipe may stand for its file.

meshkit train pretrain --steps 20
meshkit train --nproc-per-node 4 pretrain --mesh "dp_shard=2 tp=2"
meshkit copy grpo .
meshkit estimate pretrain --model llama3-8b --mesh "dp_shard=8 tp=8" --device-memory 80GiB
python -m meshkit draw zbv --ranks 4 --microbatches 8
python -m meshkit draw interleaved --chunks 3 --times F=1,I=1.2,W=0.8,hop=0.1 --html interleaved.html
python -m meshkit draw mine.csv --trace mine.json
python -m meshkit estimate examples/llama_pretrain.py --model llama3-8b --mesh "dp_shard=8 tp=8" --device-memory 80GiB
python -m meshkit forecast examples/llama_pretrain.py --model llama3-8b --mesh "dp_shard=8 tp=8" --cluster h100
python -m meshkit place examples/llama_pretrain.py --mesh "pp=2 dp_shard=2 tp=2" --cluster mine.toml
python -m meshkit search examples/llama_pretrain.py --model llama3-8b --world 64 --cluster h100 --device-memory 80GiB
python -m meshkit plan-rl examples/ppo.py --world 16 --cluster h100 --device-memory 80GiB --pretrained Qwen2.5-7B/
python -m meshkit explain examples/llama_pretrain.py --mesh "pp=2 dp_shard=2 tp=2" --html run.html
python -m meshkit goodput --ranks 1024 --step-s 8 --device-mtbf-h 45000 --state 840GB --storage 20GB
python -m meshkit energy 1f1b --times F=1:1:1:1.3 --power 1980:700:1,1410:450:1.27 --idle-watts 100 --csv clocks.csv
python -m meshkit calls runs/sft/calls
python -m meshkit measure-cluster
python -m meshkit relay http://trainer:8000 --folder weights
python -m meshkit rollout-worker http://trainer:8000 --secret-file secret
python -m meshkit rollout-validator http://trainer:8000 --secret-file validators-secret
python -m meshkit meeting-place --port 29600 --replicas 4 --quorum 2 --grace 30
"""

from __future__ import annotations

import inspect
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

try:
    import tyro
except ModuleNotFoundError as missing:
    raise SystemExit(
        'meshkit needs tyro, which is in the optional extra `recipes`.\nInstall it with: pip install "meshkit[recipes]"'
    ) from missing
from rich.console import Console
from tyro.conf import Positional, arg

from meshkit.algos.plan_rl.command import PlanRL
from meshkit.algos.plan_rl.command import command as plan_rl_command
from meshkit.algos.shardcast.command import RelayOptions
from meshkit.algos.shardcast.command import command as relay_command
from meshkit.algos.workers.command import WorkerOptions
from meshkit.algos.workers.command import command as worker_command
from meshkit.algos.workers.validator_command import ValidatorOptions
from meshkit.algos.workers.validator_command import command as validator_command
from meshkit.cluster.command import MeasureCluster, measure_cluster
from meshkit.errors import MeshkitError, PlanError
from meshkit.faults import read_calls
from meshkit.optim.outer.place.command import MeetingPlaceOptions
from meshkit.optim.outer.place.command import command as meeting_place_command
from meshkit.parallel.pipeline import PerStage, Schedule, Times, check, overlap, read_csv, simulate, write_csv
from meshkit.parallel.pipeline.drawing import coloured, html, summary, svg, text, trace
from meshkit.parallel.pipeline.schedules import NAMES, named
from meshkit.preflight.energy.command import Energy
from meshkit.preflight.energy.command import command as energy_command
from meshkit.preflight.estimate.command import Memory, command
from meshkit.preflight.forecast.command import Seconds
from meshkit.preflight.forecast.command import command as forecast_command
from meshkit.preflight.goodput.command import GoodputOptions
from meshkit.preflight.goodput.command import command as goodput_command
from meshkit.preflight.page.command import Explain
from meshkit.preflight.page.command import command as explain_command
from meshkit.preflight.placement.command import PlaceOptions
from meshkit.preflight.placement.command import command as place_command
from meshkit.preflight.search.command import Search
from meshkit.preflight.search.command import command as search_command
from meshkit.recipes.files import RECIPES, copy, recipe_file, train

FILE = arg(metavar="FILE")
OF_SCRIPTS = ("estimate", "forecast", "place", "search", "plan-rl", "explain")
DRAWN = 1 << 14  # microbatches of all ranks in a drawing; zbv with twice as many took 49 s
PLANNED = 1 << 11  # in an energy plan; 1F1B with as many took 14 s


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Print who was where, from the files of `run_main(calls=FOLDER)`: calls that are missing, then the last of each rank."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Run a recipe: meshkit train [OPTIONS OF TORCHRUN] RECIPE [FLAGS]. RECIPE --help shows its flags.

    Options before the recipe's name, as --nproc-per-node 4, start that many ranks by torchrun; without any it runs in this
    process, as one rank.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE", help=", ".join(RECIPES))]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy a recipe's file, to read and change: it needs nothing but meshkit."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE", help=", ".join(RECIPES))]
    to: Annotated[Positional[Path], arg(metavar="WHERE", help="a folder, or a name for the file")] = Path(".")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw a pipeline schedule in time, and print what it costs: makespan, bubble rate, activations on every rank.

    Text goes to the terminal, in colour if it is one. A cell `2B5` is stage 2, op B (F forward, B backward, I input
    gradient, W weight gradient), microbatch 5; the stage is left out where every rank has one.
    """

    schedule: Annotated[
        Positional[str], arg(metavar="SCHEDULE", help=f"{', '.join(NAMES)}, or a CSV file with a table")
    ]
    ranks: Annotated[int, arg(aliases=["--stages"])] = 4
    """ranks of the axis pp; --stages is the same number"""
    microbatches: int = 8
    """microbatches of one step"""
    chunks: int | None = None
    """stages per rank of interleaved and auto, waves of hanayo; the default is the schedule's"""
    max_live: int | None = None
    """most activations of one stage and microbatch that a rank may hold, for auto"""
    times: Annotated[str, arg(metavar="OP=TIME,...")] = "F=1,I=1,W=1"
    """time of each op, in any unit, and of a hop between ranks: F=1,I=1,W=1,hop=0.1. B is I + W unless given. Colons
    separate stages: F=1:1:1:2. overlap=1 hides the shorter half of an overlapped forward and backward, 0 nothing"""
    svg: Annotated[Path | None, FILE] = None
    """write the picture"""
    html: Annotated[Path | None, FILE] = None
    """write a page with the picture and the numbers"""
    trace: Annotated[Path | None, FILE] = None
    """write a trace for chrome://tracing or ui.perfetto.dev"""
    csv: Annotated[Path | None, FILE] = None
    """write the table"""


def draw(options: Draw) -> None:
    times = parse_times(options.times)
    schedule = find_schedule(options, times)
    if isinstance(times.freed_by_w, float):
        # So that schedules compare: 1 is one microbatch in all stages of a rank.
        times = replace(times, freed_by_w=schedule.world / schedule.stages)
    simulation = simulate(schedule, times)
    width = shutil.get_terminal_size((100, 24)).columns
    if sys.stdout.isatty():
        Console(width=width, highlight=False).print(coloured(simulation, width=width))
    else:
        print(text(simulation, width=width))
    print()
    print(summary(simulation))
    print("one unit of activations: one microbatch in all stages of a rank")
    files = {
        options.svg: lambda: svg(simulation),
        options.html: lambda: html(simulation),
        options.trace: lambda: trace(simulation),
    }
    for path, make in files.items():
        if path is not None:
            path.write_text(make(), encoding="utf-8")
            print(f"wrote {path}")
    if options.csv is not None:
        write_csv(schedule, options.csv)
        print(f"wrote {options.csv}")


def find_schedule(options: Draw | Energy, times: Times) -> Schedule:
    """Raises: PlanError for what cannot be drawn, and for what nobody could see in a drawing."""
    name = options.schedule
    verb, most = ("draw", DRAWN) if isinstance(options, Draw) else ("energy", PLANNED)
    if (cells := options.ranks * options.microbatches * (options.chunks or 1)) > most:
        raise PlanError(
            f"{verb} {name} with {cells:,} microbatches on ranks: of so many none is seen, and they take minutes. Give "
            f"--ranks times --microbatches (times --chunks) of at most {most:,}; a schedule repeats itself."
        )
    if name.lower().endswith(".csv"):
        schedule = read_csv(Path(name))
        check(schedule)
        return schedule
    generate = named(name.lower().replace("_", "-"))
    takes = inspect.signature(generate).parameters
    keywords: dict[str, object] = {"times": times} if "times" in takes else {}
    for flag, value, meanings in (
        ("--chunks", options.chunks, ("chunks", "waves")),
        ("--max-live", options.max_live, ("max_live",)),
    ):
        if value is None:
            continue
        keyword = next((keyword for keyword in meanings if keyword in takes), None)
        if keyword is None:
            raise PlanError(f"{flag} {value}: {name} has no choice there. Leave it out.")
        keywords[keyword] = value
    return generate(options.ranks, options.microbatches, **keywords)


def parse_times(words: str) -> Times:
    """`F=1,I=1,hop=0.1` as `Times`."""
    fields = {"F": "f_s", "I": "i_s", "W": "w_s", "B": "b_s", "hop": "hop_s", "overlap": "fb_s"}
    times: dict[str, PerStage | Callable[[float, float], float]] = {}
    for word in filter(None, words.replace(" ", "").split(",")):
        key, _, value = word.partition("=")
        try:
            numbers = tuple(map(float, value.split(":")))
        except ValueError:
            numbers = ()
        is_single = key in ("hop", "overlap")
        if key not in fields or not numbers or (is_single and len(numbers) > 1):
            raise PlanError(
                f"--times {words}: cannot read {word!r}. "
                f"Write numbers for some of {', '.join(fields)}, as F=1,I=1,W=1,hop=0.1; for stages apart, F=1:1:1:2."
            )
        if not all(0 <= number < math.inf for number in numbers):
            raise PlanError(f"--times {words}: {word!r} is no time. Give numbers from 0 up.")
        value_s = numbers[0] if len(numbers) == 1 else numbers
        times[fields[key]] = overlap(numbers[0]) if key == "overlap" else value_s
    return Times(**times)  # type: ignore[arg-type]  # each value fits its name


def main() -> None:
    choose = tyro.extras.subcommand_cli_from_dict
    try:
        named = sys.argv[2:3] and sys.argv[2] in RECIPES and not Path(sys.argv[2]).is_file()
        if named and sys.argv[1] in OF_SCRIPTS:
            sys.argv[2] = str(recipe_file(sys.argv[2]))
        if sys.argv[1:2] == ["train"] and sys.argv[2:] not in (["--help"], ["-h"]):
            train(sys.argv[2:])  # the words belong to torchrun and to the recipe
        elif sys.argv[1:2] == ["estimate"]:
            command(sys.argv[2:])  # what it does not know are flags of the script
        elif sys.argv[1:2] == ["forecast"]:
            forecast_command(sys.argv[2:])
        elif sys.argv[1:2] == ["place"]:
            place_command(sys.argv[2:])
        elif sys.argv[1:2] == ["search"]:
            search_command(sys.argv[2:])
        elif sys.argv[1:2] == ["plan-rl"]:
            plan_rl_command(sys.argv[2:])
        elif sys.argv[1:2] == ["explain"]:
            explain_command(sys.argv[2:])
        else:
            chosen = choose(
                {
                    "train": Train,
                    "copy": Copy,
                    "draw": Draw,
                    "estimate": Memory,
                    "forecast": Seconds,
                    "place": PlaceOptions,
                    "search": Search,
                    "plan-rl": PlanRL,
                    "explain": Explain,
                    "goodput": GoodputOptions,
                    "relay": RelayOptions,
                    "rollout-worker": WorkerOptions,
                    "rollout-validator": ValidatorOptions,
                    "meeting-place": MeetingPlaceOptions,
                    "energy": Energy,
                    "calls": Calls,
                    "measure-cluster": MeasureCluster,
                },
                prog="meshkit",
                description=__doc__,
            )
            if isinstance(chosen, Calls):
                print(read_calls(chosen.folder))
            elif isinstance(chosen, GoodputOptions):
                goodput_command(chosen)
            elif isinstance(chosen, RelayOptions):
                relay_command(chosen)
            elif isinstance(chosen, WorkerOptions):
                worker_command(chosen)
            elif isinstance(chosen, ValidatorOptions):
                validator_command(chosen)
            elif isinstance(chosen, MeetingPlaceOptions):
                meeting_place_command(chosen)
            elif isinstance(chosen, Energy):
                times = parse_times(chosen.times)
                energy_command(chosen, find_schedule(chosen, times), times)
            elif isinstance(chosen, Copy):
                print(f"wrote {copy(chosen.recipe, chosen.to)}")
            elif isinstance(chosen, MeasureCluster):
                measure_cluster(chosen)
            elif isinstance(chosen, Draw):
                draw(chosen)
    except (MeshkitError, OSError) as error:  # a file that cannot be written, for one
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
