"""A token-level Mixture-of-Experts routing engine.

The Python entry is `Engine`, `EngineConfig`, `SamplingParams` and `TokenRouter`; they load on first
use, so that `import engine` starts nothing and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig, SamplingParams
    from engine.routing.router import TokenRouter
    from engine.runtime.engine import Completion, Engine

__version__ = "0.1.0"
__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams", "TokenRouter"]

_HOMES = {
    "Completion": "engine.runtime.engine",
    "Engine": "engine.runtime.engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.config",
    "TokenRouter": "engine.routing.router",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
