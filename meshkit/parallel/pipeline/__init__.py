"""Pipeline parallelism: schedules as tables, and stages that run them."""

from ._check import Checked as Checked
from ._check import check as check
from ._csv import read_csv as read_csv
from ._csv import write_csv as write_csv
from ._draw import html as html
from ._draw import svg as svg
from ._draw import text as text
from ._draw import trace as trace
from ._pipeline import Generator as Generator
from ._pipeline import Pipeline as Pipeline
from ._pipeline import pipeline_parallel as pipeline_parallel
from ._pipeline import plan_pipeline as plan_pipeline
from ._simulate import Simulation as Simulation
from ._simulate import Times as Times
from ._simulate import simulate as simulate
from ._table import Row as Row
from ._table import Schedule as Schedule
from ._table import Task as Task
