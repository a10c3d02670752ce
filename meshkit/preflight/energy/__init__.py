"""Energy as Perseus plans it: rows of a pipeline that have slack run at a lower clock, by a linear program.

Joules at full clock, joules without a slowdown, the time-energy front, and a frequency plan (rank, row, MHz) as CSV.
"""

from ._drawing import front_svg as front_svg
from ._drawing import svg as svg
from ._plan import EnergyPlan as EnergyPlan
from ._plan import front as front
from ._plan import plan_energy as plan_energy
from ._plan import write_csv as write_csv
from ._power import Power as Power
from ._power import PowerPoint as PowerPoint
