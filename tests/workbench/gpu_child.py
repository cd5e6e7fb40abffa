"""Stands in for a section's process of the GPU bench: each section ends in a way of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from workbench.bench.gpu.child import end_with_runner

end_with_runner()
spec = json.loads(sys.argv[1])
section, path = spec["section"], Path(spec["path"])
rows = [{"machine": {"device": "a stand-in", "torch": "0", "triton": "0", "python": "0"}}]
if section == "ceilings":
    rows += [{"ceiling": "copy_gbs", "value": 100.0}]
else:
    rows += [{"section": section, "told": spec["ceilings"], "right": True}]
path.write_text("".join(json.dumps(row) + "\n" for row in rows))
if section == "correctness":
    raise RuntimeError("an illegal memory access")
if section == "formats":
    with path.open("a") as file:
        file.write('{"cut sh')
    os.kill(os.getpid(), signal.SIGKILL)
if section == "large":
    time.sleep(600)
