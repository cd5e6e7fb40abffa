"""What this machine has, against what the workbench and a deployment ask for.

A check returns `ok`, `warn` (works, with less: the text says what that means) or `fail` (something
needed is missing: the text says what to do). A laptop without a GPU is a supported machine. Called
by `workbench doctor`.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from workbench import paths
from workbench.bench.machine import cpu_name, gpus, total_memory, usable_cores
from workbench.output import count, size

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_MEMORY_BYTES = 2e9
GOOD_MEMORY_BYTES = 4e9
MIN_DISK_BYTES = 1e9
GOOD_DISK_BYTES = 10e9
MIN_SHM_BYTES = 256e6
MIN_OPEN_FILES = 1024
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LARGE_MODEL = "8 GPUs of 24 GB, 500 GB of SSD and 25 Gbit/s between machines"
"""What a deployment of a large model starts from."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the examination."""

    name: str
    status: str
    """`ok`, `warn` or `fail`."""
    found: str
    """What there is."""
    advice: str = ""
    """What it means and what to do, when the status is not `ok`."""


def examine(model: str = paths.DEFAULT_MODEL) -> Iterator[Check]:
    """Yield one check after another; a check that breaks is a `fail`, never an exception."""
    checks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("python", _python),
        ("system", _system),
        ("torch", _torch),
        ("triton", _triton),
        ("gpu", _gpu),
        ("matrix product", _product),
        ("communication", _communication),
        ("cores", _cores),
        ("memory", _memory),
        ("disk", _disk),
        ("shared memory", _shared_memory),
        ("open files", _open_files),
        ("network", _network),
        ("loopback port", _port),
        ("model", lambda: _model(model)),
        ("screens", _screens),
        ("transformers", _transformers),
        ("browser", _browser),
    )
    for name, check in checks:
        try:
            yield check()
        except Exception as wrong:  # whatever is broken here is a finding, not a crash
            reason = " ".join(str(wrong).split()) or type(wrong).__name__
            yield Check(name, "fail", f"could not be examined: {reason}", "mend this first.")


def worst(checks: list[Check]) -> str:
    """Return `fail`, `warn` or `ok`: the worst status among `checks`."""
    statuses = {check.status for check in checks}
    return next((s for s in ("fail", "warn") if s in statuses), "ok")


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.prefix}"
    if sys.version_info >= MIN_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "install Python 3.11 or newer.")


def _system() -> Check:
    found = platform.platform(terse=True)
    if sys.platform == "linux":
        return Check("system", "ok", found)
    return Check(
        "system", "warn", found, "Triton kernels need Linux; here the torch path runs instead."
    )


def _torch() -> Check:
    import torch

    found = torch.__version__
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if numbers >= MIN_TORCH:
        return Check("torch", "ok", found)
    return Check("torch", "fail", found, f"install torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer.")


def _triton() -> Check:
    try:
        return Check("triton", "ok", version("triton"))
    except PackageNotFoundError:
        return Check("triton", "warn", "not installed", "kernels take the torch path instead.")


def _gpu() -> Check:
    import torch

    found = gpus()
    if found:
        kinds = ", ".join(sorted({f"{gpu['name']} {gpu['memory_gb']} GB" for gpu in found}))
        cuda = f"CUDA {torch.version.cuda}, cuDNN {_cudnn_version()}"
        return Check("gpu", "ok", f"{len(found)} x {kinds}; {cuda}")
    if list(Path("/dev").glob("nvidia[0-9]*")):
        return Check(
            "gpu",
            "warn",
            f"there is one, but torch {torch.__version__} cannot use it",
            "install a driver and a CUDA build of torch that fit each other; "
            "until then everything runs on the CPU.",
        )
    return Check(
        "gpu",
        "warn",
        "none",
        "everything runs on the CPU; GPU kernels can be compiled and inspected but not run. "
        f"A large model starts at {LARGE_MODEL}.",
    )


def _cudnn_version() -> str:
    from torch.backends import cudnn

    return str(cudnn.version())  # type: ignore[no-untyped-call]


def _product() -> Check:
    """Multiply two matrices on every kind of device and compare with 64-bit numbers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    right = a.double() @ b.double()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        product = (a.to(device) @ b.to(device)).cpu().double()
        error = float((product - right).abs().max() / right.abs().max())
        if not error < 1e-2:
            return Check(
                "matrix product",
                "fail",
                f"wrong on {device} by {error:.1e}",
                "reinstall torch; on a GPU check the driver.",
            )
    return Check("matrix product", "ok", f"right on {' and '.join(devices)}")


def _communication() -> Check:
    import torch.distributed as dist

    if not dist.is_available():
        return Check(
            "communication",
            "warn",
            "torch.distributed is missing",
            "logical devices in one process work; ranks in several processes do not.",
        )
    found = [
        name
        for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
        if there
    ]
    return Check("communication", "ok", ", ".join(found) or "no backend")


def _cores() -> Check:
    cores = usable_cores()
    found = f"{count(cores, 'core')}, {cpu_name()}"
    if cores >= 2:
        return Check("cores", "ok", found)
    return Check("cores", "warn", found, "the engine and the dashboard will share one core.")


def _memory() -> Check:
    total = total_memory()
    if total < MIN_MEMORY_BYTES:
        return Check(
            "memory", "fail", size(total), f"at least {size(MIN_MEMORY_BYTES)} are needed."
        )
    if total < GOOD_MEMORY_BYTES:
        return Check("memory", "warn", size(total), "close other programs before `start`.")
    return Check("memory", "ok", size(total))


def _disk() -> Check:
    free = shutil.disk_usage(paths.root()).free
    found = f"{size(free)} free at {paths.root()}"
    if free < MIN_DISK_BYTES:
        return Check("disk", "fail", found, f"free at least {size(MIN_DISK_BYTES)}.")
    if free < GOOD_DISK_BYTES:
        return Check("disk", "warn", found, "enough for the models; long traces may fill it.")
    return Check("disk", "ok", found)


def _shared_memory() -> Check:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Check("shared memory", "ok", "no /dev/shm on this system, none needed")
    total = shutil.disk_usage(place).total
    if total >= MIN_SHM_BYTES:
        return Check("shared memory", "ok", size(total))
    return Check(
        "shared memory",
        "warn",
        size(total),
        "ranks in several processes may run out; start the container with --shm-size=1g.",
    )


def _open_files() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Check("open files", "ok", found)
    return Check("open files", "warn", found, f"raise it: ulimit -n {MIN_OPEN_FILES}.")


def _network() -> Check:
    """Say how fast the machine's links are; one machine alone needs none."""
    speeds = []
    for file in Path("/sys/class/net").glob("*/speed"):
        try:
            speeds.append(int(file.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # a link that is down or virtual states no speed
    fastest = max(speeds, default=-1)
    found = f"{fastest / 1000:g} Gbit/s" if fastest > 0 else "no link states its speed"
    return Check("network", "ok", f"{found}; one machine needs loopback only")


def _port() -> Check:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as wrong:
            return Check(
                "loopback port",
                "fail",
                f"127.0.0.1 cannot be bound: {wrong.strerror}",
                "allow loopback sockets; the dashboard and its stream need them.",
            )
        return Check("loopback port", "ok", f"127.0.0.1 gives ports, {probe.getsockname()[1]} now")


def _model(name: str) -> Check:
    from engine.checkpoint.load import read_config
    from engine.checkpoint.manifest import verify
    from engine.errors import WorkbenchError

    try:
        folder = paths.model_folder(name)
        manifest = verify(folder)
        config = read_config(folder)
    except WorkbenchError as wrong:
        reason = " ".join(str(wrong).split())
        return Check("model", "fail", reason, "take a good copy of the folder.")
    shape = (
        f"{config.num_layers} layers, {config.num_experts} experts, top-{config.top_k}"
        if config.is_moe
        else f"{config.num_layers} layers, dense"
    )
    total = sum(file.bytes for file in manifest.files.values())
    return Check("model", "ok", f"{folder}: {shape}, {size(total)}, hashes right")


def _screens() -> Check:
    missing = [name for name in ("panel", "bokeh", "jupyterlab") if find_spec(name) is None]
    if not missing:
        found = ", ".join(f"{name} {version(name)}" for name in ("panel", "jupyterlab"))
        return Check("screens", "ok", found)
    return Check(
        "screens",
        "warn",
        f"{', '.join(missing)} not installed",
        "`workbench start` needs the extra 'ui'; generate, explain and trace work without.",
    )


def _transformers() -> Check:
    if find_spec("transformers"):
        return Check("transformers", "ok", version("transformers"))
    return Check(
        "transformers",
        "warn",
        "not installed",
        "`bench decode` compares with it; install the extra 'hf'.",
    )


def _browser() -> Check:
    found = next((place for name in BROWSERS if (place := shutil.which(name))), None)
    if found:
        return Check("browser", "ok", found)
    # Playwright keeps its own browsers in the user's cache.
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ms-playwright"
    if any(cache.glob("chromium*")):
        return Check("browser", "ok", f"Playwright's Chromium in {cache}")
    return Check(
        "browser",
        "warn",
        "no Chromium in the path",
        "any browser shows the dashboard; screenshots and browser tests need Chromium.",
    )
