"""Pipeline parallelism: schedules as tables, and stages that run them."""

from ._check import Checked as Checked
from ._check import check as check
from ._csv import read_csv as read_csv
from ._csv import write_csv as write_csv
from .drawing import html as html
from .drawing import record_trace as record_trace
from .drawing import svg as svg
from .drawing import text as text
from .drawing import trace as trace
from ._pipeline import Cut as Cut
from ._pipeline import Pipeline as Pipeline
from ._pipeline import cut_stages as cut_stages
from ._pipeline import pipeline_of as pipeline_of
from ._pipeline import pipeline_parallel as pipeline_parallel
from ._pipeline import plan_pipeline as plan_pipeline
from ._record import Measured as Measured
from ._record import times_of as times_of
from ._simulate import Simulation as Simulation
from ._simulate import Times as Times
from ._simulate import simulate as simulate
from ._split_backward import split_linears as split_linears
from ._split_backward import weight_gradient as weight_gradient
from ._table import Row as Row
from ._table import Schedule as Schedule
from ._table import Task as Task
from .schedules import Generator as Generator
