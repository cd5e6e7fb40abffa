"""The Triton kernels; each module lists what it ships in `variants()`."""
