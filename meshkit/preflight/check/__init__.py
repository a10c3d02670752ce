"""Run one step of your model on a small mesh and on one device, and name what differs: module, parameter, axis, mistake."""

from ._check import check as check
from ._finding import Finding as Finding
from ._finding import Report as Report
