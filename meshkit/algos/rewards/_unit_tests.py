"""Code reward: 1 if a program passes its unit tests in the sandbox, else 0."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshkit.algos.rewards._sandbox import SandboxLimits, run_sandboxed
from meshkit.algos.rollout import Rollout

_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class UnitTests:
    """1 if the answer's program, followed by the field `tests`, runs to its end, else 0.

    The program is the text's last fenced block, or all of the text without one. The field `prelude`, if there is one, comes
    before it: a signature to be continued. `tests` are plain Python with asserts. A program beyond the limits is wrong.
    Raises: RewardError where there is no sandbox; KeyError for a row without tests. Neither makes the answer wrong.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def __call__(self, answer: Rollout) -> float:
        blocks = _FENCED.findall(answer.text)
        program = str(answer.fields.get("prelude", "")) + (blocks[-1] if blocks else answer.text)
        verdict = run_sandboxed(f"{program}\n\n{answer.fields['tests']}\n", limits=self.limits)
        return float(verdict.end == "passed")
