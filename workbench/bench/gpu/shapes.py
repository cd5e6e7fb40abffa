"""The layers that are measured: the experts of published models, and stand-ins for a dry run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One MoE layer."""

    name: str
    hidden: int
    """D."""
    width: int
    """F, of one expert."""
    num_experts: int
    """E."""
    top_k: int
    """K."""
    scheme: str = "native"
    """How the experts' weights are stored: `native` (bf16) or `e4m3`."""
    source: str = ""

    @property
    def expert_elements(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.width

    @property
    def bytes(self) -> int:
        """Of all experts' weights."""
        return self.weight_bytes * self.num_experts * self.expert_elements

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element of the experts' weights."""
        return 1 if self.scheme == "e4m3" else 2


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="mixtral-8x7b",
            hidden=4096,
            width=14336,
            num_experts=8,
            top_k=2,
            source="arXiv 2401.04088, table 1",
        ),
        Shape(
            name="olmoe",
            hidden=2048,
            width=1024,
            num_experts=64,
            top_k=8,
            source="arXiv 2409.02060, appendix B",
        ),
        Shape(
            name="qwen3-30b-a3b",
            hidden=2048,
            width=768,
            num_experts=128,
            top_k=8,
            source="config.json of Qwen3-30B-A3B",
        ),
        Shape(
            name="deepseek-v3",
            hidden=7168,
            width=2048,
            num_experts=256,
            top_k=8,
            scheme="e4m3",
            source="arXiv 2412.19437, section 4.2",
        ),
    )
}

TOKENS = (1, 8, 32, 128, 512, 2048, 8192)

TINY = {
    name: Shape(
        name=name,
        hidden=64,
        width=32,
        num_experts=4,
        top_k=2,
        scheme=shape.scheme,
        source="a stand-in for the dry run",
    )
    for name, shape in SHAPES.items()
}
TINY_TOKENS = (1, 5)
