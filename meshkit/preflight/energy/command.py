"""`python -m meshkit energy`: the clock of every row of a pipeline schedule, joules without a slowdown, and the front."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Schedule, Times
from meshkit.parallel.pipeline.schedules import NAMES
from meshkit.preflight._format import table_lines
from meshkit.preflight.energy._drawing import front_svg, svg
from meshkit.preflight.energy._plan import front, plan_energy, write_csv
from meshkit.preflight.energy._power import PowerPoint

FILE = arg(metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Plan a lower clock for the rows of a pipeline that have slack, as Perseus does: the same step in fewer joules.

    --power has the clocks of a device: MHz, watts, and the time of the work over that at the full clock, which has 1:
    1980:700:1,1410:450:1.27. Needs scipy: pip install "meshkit[search]".
    """

    schedule: Annotated[
        Positional[str], arg(metavar="SCHEDULE", help=f"{', '.join(NAMES)}, or a CSV file with a table")
    ]
    power: Annotated[str, arg(metavar="MHZ:W:SLOWDOWN,...")]
    """clocks of a device"""
    idle_watts: float
    """of a device that waits"""
    ranks: Annotated[int, arg(aliases=["--stages"])] = 4
    """ranks of the axis pp; --stages is the same number"""
    microbatches: int = 8
    """microbatches of one step"""
    chunks: int | None = None
    """stages per rank of interleaved and auto, waves of hanayo; the default is the schedule's"""
    max_live: int | None = None
    """most activations of one stage and microbatch that a rank may hold, for auto"""
    times: Annotated[str, arg(metavar="OP=TIME,...")] = "F=1,I=1,W=1"
    """seconds of each op at the full clock, as `draw` has them; for stages apart, F=1:1:1:2"""
    slowdown: float = 0.0
    """how much longer the step may take, 0.01 for 1 %"""
    devices: int = 1
    """of each rank of pp: tp times dp and so on"""
    csv: Annotated[Path | None, FILE] = None
    """write the frequency plan: rank, row, task, MHz, start, end"""
    svg: Annotated[Path | None, FILE] = None
    """write a picture of the step, at full clock and planned"""
    front: Annotated[Path | None, FILE] = None
    """write a picture of the time-energy front, and print it"""


def command(options: Energy, schedule: Schedule, times: Times) -> None:
    power = parse_power(options.power)
    plan = plan_energy(
        schedule,
        times,
        power=power,
        idle_watts=options.idle_watts,
        slowdown=options.slowdown,
        devices=options.devices,
    )
    print(plan)
    if options.front is not None:
        plans = front(schedule, times, power=power, idle_watts=options.idle_watts, devices=options.devices)
        rows = [("step", "slower", "joules", "saved")]
        rows += [(f"{p.step_s:.6g} s", f"{p.slowdown:.2%}", f"{p.joules:.6g}", f"{p.saved:.2%}") for p in plans]
        print("\n" + "\n".join(table_lines(rows, right=range(4))))
        options.front.write_text(front_svg(plans), encoding="utf-8")
        print(f"wrote {options.front}")
    if options.svg is not None:
        options.svg.write_text(svg(plan), encoding="utf-8")
        print(f"wrote {options.svg}")
    if options.csv is not None:
        write_csv(plan, options.csv)
        print(f"wrote {options.csv}")


def parse_power(words: str) -> tuple[PowerPoint, ...]:
    """`1980:700:1,1410:450:1.27` as power points. Raises: PlanError for something else."""
    points = []
    for word in filter(None, words.replace(" ", "").split(",")):
        try:
            mhz, watts, slowdown = map(float, word.split(":"))
        except ValueError:
            raise PlanError(
                f"--power {words[:60]}: cannot read {word[:40]!r}. Write MHz:watts:slowdown for each clock, as "
                "1980:700:1,1410:450:1.27."
            ) from None
        points.append(PowerPoint(mhz=mhz, watts=watts, slowdown=slowdown))
    return tuple(points)
