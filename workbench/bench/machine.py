"""What a number was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import RequestError


def machine() -> dict[str, Any]:
    """Return processor, threads, load, memory, accelerators and library versions."""
    import numpy
    import torch

    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "memory_gb": round(total_memory() / 1e9, 1),
        "gpus": gpus(),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let one product use `threads` threads meanwhile; None leaves torch's setting.

    Raises:
        RequestError: `threads` is below 1.
    """
    import torch

    before = torch.get_num_threads()
    if threads is not None and threads < 1:
        raise RequestError(f"threads ({threads}) must be a whole number of at least 1.")
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int:
    """Return the machine's memory in bytes, or a container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def gpus() -> list[dict[str, Any]]:
    """Return name, memory and compute capability of each GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "memory_gb": round(gpu.total_memory / 1e9, 1),
            "capability": f"{gpu.major}.{gpu.minor}",
        }
        for gpu in found
    ]


def report(rows: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """Return measured rows with the machine and the command that made them."""
    return {"rows": rows, "machine": machine(), "command": command, "label": "measured"}
