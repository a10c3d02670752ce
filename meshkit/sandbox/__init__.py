"""Sandbox for untrusted code (bubblewrap, namespaces, Landlock, seccomp): runs a program, and judges it from outside."""

from ._run import SandboxLimits as SandboxLimits
from ._run import Verdict as Verdict
from ._run import run_sandboxed as run_sandboxed
