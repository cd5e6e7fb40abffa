"""Number formats by unit behind the service: what an operator reads of them."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from tests.serve.conftest import NAME
from tests.serve.test_observe import scraped

BODY = {"model": NAME, "prompt": "12 * 7 = 84\n13 * 7 = ", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def choosing(make_server):
    return make_server({"precision": "auto", "dtype": "bfloat16", "prefix_reuse": False})


def grown(server):
    """Ask once; returns by how much each of the counters grew."""

    def read(client):
        found = scraped(client)
        units = found["tokenrouter_precision_units_total"]
        sums = {dict(labels)["format"]: value for labels, value in units.items()}
        for name in ("failed_units", "rerun_rows", "format_changes"):
            sums[name] = found[f"tokenrouter_precision_{name}_total"][()]
        return sums

    with httpx.Client(base_url=server.url, timeout=60) as client:
        before = read(client)
        assert client.post("/v1/completions", json=BODY).status_code == 200
        return {name: value - before[name] for name, value in read(client).items()}


@pytest.mark.parametrize(
    ("point", "fault", "name"),
    [
        ("precision.vote", lambda f: np.resize(np.array([0, 1], np.int8), len(f)), "changes"),
        ("precision.check", np.ones_like, "failed"),
    ],
)
def test_formats_that_flap_and_units_that_fail_are_seen(choosing, point, fault, name):
    healthy = grown(choosing)
    assert healthy["int8"] > healthy["full"] > 0 and healthy["failed_units"] <= 1
    control = choosing.service.loop.engine.control
    control.inject(point, fault, lease_s=60)
    try:
        broken = grown(choosing)
    finally:
        control.clear(point)
    if name == "changes":
        assert broken["format_changes"] > 2 * healthy["format_changes"]
    else:
        assert broken["failed_units"] == broken["int8"] + broken["full"]
        assert broken["rerun_rows"] > 10 * healthy["rerun_rows"]


def test_where_nothing_is_chosen_nothing_is_told(client, complete):
    complete()
    assert "tokenrouter_precision_" not in client.get("/metrics").text
