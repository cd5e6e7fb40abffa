"""What a number was measured on."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.config import MAX_THREADS
from engine.errors import MachineError, RequestError

THREADS_PER_CORE = 4
"""More than these on one core measure nothing."""
PROBE_BYTES = 1 << 20


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
        RequestError: `threads` is below 1, or more than `THREADS_PER_CORE` on a core.
    """
    import torch

    before = torch.get_num_threads()
    most = min(MAX_THREADS, THREADS_PER_CORE * usable_cores())
    if threads is not None and not 1 <= threads <= most:
        raise RequestError(f"threads ({threads}) must lie between 1 and {most} on this machine.")
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def require_triton() -> None:
    """Refuse, before anything is measured, a machine on which no kernel can be compiled.

    Raises:
        MachineError: triton is not installed, or its cache cannot be written.
    """
    if find_spec("triton") is None:
        raise MachineError("triton is not installed; install the packages of pyproject.toml.")
    import triton

    cache = Path(triton.knobs.cache.dir)
    try:
        probe(cache)
    except OSError as wrong:
        raise MachineError(
            f"Triton's cache ({cache}) cannot be written: {wrong.strerror}; set TRITON_CACHE_DIR "
            "to a folder that can."
        ) from None


def probe(folder: Path) -> None:
    """Make a folder and see that it takes a file, which is taken away again.

    Raises:
        OSError: it does not, as on a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


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
