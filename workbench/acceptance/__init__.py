"""The six acceptance checks of the deployment guide, on any service that answers over HTTP.

Connectivity, output format, 100 requests at once, expert load, the log, identical repeats. A check
reads answers only; a service that says 200 and nothing else passes none of them.
"""

from __future__ import annotations

from workbench.acceptance.expectations import Expectations
from workbench.acceptance.run import accept, report_lines

__all__ = ["Expectations", "accept", "report_lines"]
