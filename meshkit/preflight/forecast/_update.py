"""What an optimizer's step costs: passes over this rank's shard on the device, or the host's update and what crosses."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.cluster import Cluster
from meshkit.core.rng import CHUNK
from meshkit.strategy import OptimizerPolicy, States

ADAM_BYTES = 28  # of an element in fp32: parameter, gradient and two moments are read, and all but the gradient written
NORM_BYTES = 12  # clipping reads a gradient for its norm, then reads and writes it
CROSSING_BYTES = 4  # of a gradient to the host, and of a parameter back

# (bytes that operators read and write for an element, operators for each `CHUNK` of elements) of LowBitAdamW, which is no
# fused kernel: counted by tests/preflight/forecast/test_update.py.
PASSES: dict[tuple[States, bool], tuple[float, int]] = {
    ("8bit", False): (204, 35),
    ("4bit", False): (228, 51),
    ("fp8", False): (188, 35),
    ("fp32", True): (448, 46),
    ("8bit", True): (528, 64),
    ("4bit", True): (552, 80),
    ("fp8", True): (512, 64),
}


@dataclass(frozen=True, kw_only=True)
class Update:
    """element_bytes: read and written for an element on the device, without clipping. operators: for each CHUNK elements.
    on_host: the share of elements that the host updates; streamed: their gradients leave during backward; delayed: the
    host's update runs beside the next step.
    """

    element_bytes: float = ADAM_BYTES
    operators: int = 0
    on_host: float = 0.0
    streamed: bool = True
    delayed: bool = False

    @staticmethod
    def of(policy: OptimizerPolicy, *, stages: bool) -> Update:
        """stages: with pp gradients of tied weights are added after the last backward, so none leaves before."""
        if policy.offload is not None:
            return Update(on_host=1 - policy.offload.resident, streamed=not stages, delayed=policy.offload.delayed)
        passes = PASSES.get((policy.states, policy.stochastic_rounding))
        return Update() if passes is None else Update(element_bytes=passes[0], operators=passes[1])

    def seconds(self, elements: int, cluster: Cluster, *, backward_s: float, step_s: float) -> float:
        """What is seen of it after the last backward. elements: of this rank. backward_s: of the last microbatch, beside
        which gradients leave; step_s: of all microbatches, beside which a delayed update runs.
        """
        device, host = cluster.device, cluster.host
        rate = device.memory_bytes_per_s * device.efficiency.memory
        there = elements * self.on_host
        read_s = (NORM_BYTES * elements + self.element_bytes * (elements - there)) / rate
        update_s = read_s + self.operators * elements / CHUNK * device.launch_s  # of short operators launches are seen
        if not there:
            return update_s
        crossing_s = there * CROSSING_BYTES / host.bytes_per_s
        shown_s = max(0.0, crossing_s - backward_s) if self.streamed else crossing_s
        host_s = max(there / host.adam_params_per_s, crossing_s)  # parameters go back part by part, as they are updated
        return update_s + shown_s + (max(0.0, host_s - step_s) if self.delayed else host_s)


FUSED = Update()
