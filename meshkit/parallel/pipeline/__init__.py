"""Pipeline parallelism: schedules as tables, and stages that run them."""

from ._pipeline import Generator as Generator
from ._pipeline import Pipeline as Pipeline
from ._pipeline import pipeline_parallel as pipeline_parallel
from ._pipeline import plan_pipeline as plan_pipeline
from ._table import Row as Row
from ._table import Schedule as Schedule
from ._table import Task as Task
