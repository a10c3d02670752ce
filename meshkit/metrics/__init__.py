"""Metrics of a run: throughput, MFU, peak memory, gradient noise, logger, profiler. Importing it needs only torch."""

from ._load import load_picture as load_picture
from ._load import load_scalars as load_scalars
from ._flops import FlopsPerToken as FlopsPerToken
from ._flops import ModelFlops as ModelFlops
from ._flops import document_lengths as document_lengths
from ._flops import train_flops_per_token as train_flops_per_token
from ._logger import Logger as Logger
from ._meter import Meter as Meter
from ._meter import Rate as Rate
from ._meter import Reading as Reading
from ._meter import peak_memory as peak_memory
from ._flops import peak_flops_of as peak_flops_of
from ._flops import peak_flops_per_s as peak_flops_per_s
from ._noise import GradientNoise as GradientNoise
from ._noise import NoiseScale as NoiseScale
from ._profile import profile as profile
from ._progress import Progress as Progress
from ._samples import show_samples as show_samples
from meshkit.faults.stragglers import Report as Report
from meshkit.faults.stragglers import Stragglers as Stragglers
from ._trackers import TrackerName as TrackerName
from ._trackers import Tracker as Tracker
from ._sums import MetricSums as MetricSums
