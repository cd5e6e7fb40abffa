"""On what a rank computes: the CPU, or a GPU of its own.

On GPUs rows travel by NCCL, on CPUs by Gloo (`engine.exchange.group`). NCCL runs each exchange on a
stream of its own, which waits by an event for what was computed before, and the stream that
computes waits by an event for what arrives; so `overlapped` hides there what it hides on CPUs, and
the host waits only for the counts.
"""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import MachineError


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Return what rank `rank` computes on: `cpu`, or the GPU of its number."""
    return torch.device("cpu") if config.run_on == "cpu" else torch.device("cuda", rank)


def check_devices(config: EngineConfig, num_gpus: int | None = None) -> None:
    """Refuse ranks that have no GPU where they ask for one.

    Args:
        config: what to run on.
        num_gpus: of this machine; None counts them.

    Raises:
        MachineError: there are fewer GPUs than ranks.
    """
    if config.run_on == "cpu":
        return
    found = torch.cuda.device_count() if num_gpus is None else num_gpus
    if found < config.num_ranks:
        there = "no GPU" if not found else "1 GPU" if found == 1 else f"{found} GPUs"
        fewer = f"take fewer ranks (--ranks {found}) or " if found else ""
        raise MachineError(
            f"run_on (cuda) needs {config.num_ranks} GPUs, one for each rank, but this machine "
            f"shows {there}; {fewer}run on the CPU (--run-on cpu)."
        )
