"""One script for one NVIDIA GPU: is every kernel right there, and how fast is it?

    python -m workbench.bench.gpu --out DIR [--section NAME …] [--tune SECONDS] [--dry-run]

Made for a bare machine: torch, triton, numpy, safetensors and tokenizers, no network, nothing
installed. Sections run one after the other, each in a process of its own with a time limit, so that
an illegal access or a hang in one costs nothing of the others; what a section measured before it
failed is kept. `sections` lists them, `runner` runs them, `report` writes the files.
"""
