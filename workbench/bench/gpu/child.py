"""One section in a process of its own: `python -m workbench.bench.gpu.child SPEC`.

The runner starts it, and it ends with the runner: its standard input is a pipe that only the
runner's end closes. The first line it keeps says what it runs on, the others are rows.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main(spec: dict[str, Any]) -> None:
    """Run the section that `spec` names."""
    began = time.monotonic()
    from workbench.bench.gpu.sections import BY_NAME
    from workbench.bench.gpu.setting import Setting

    setting = Setting(
        dry=spec["dry"],
        deadline=began + spec["seconds"],
        path=Path(spec["path"]),
        ceilings=spec["ceilings"],
        out=Path(spec["out"]) if spec["out"] else None,
    )
    setting.keep({"machine": _machine(setting.dry)})
    BY_NAME[spec["section"]].run(setting)


def end_with_runner() -> None:
    """End this process as soon as standard input ends, which needs no library, unlike others."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch-runner", daemon=True).start()


def _machine(dry: bool) -> dict[str, Any]:
    import torch
    import triton

    from workbench.bench.machine import machine

    device = "cpu-dry-run" if dry else torch.cuda.get_device_name()
    return machine() | {"device": device, "triton": triton.__version__, "cuda": torch.version.cuda}


if __name__ == "__main__":
    end_with_runner()
    main(json.loads(sys.argv[1]))
