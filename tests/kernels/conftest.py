"""Leaves the tests of `interpreted/` to a process of their own, see `test_interpreted.py`."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("tests.kernels.router_cases")

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
