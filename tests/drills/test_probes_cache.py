"""The probes of reused prompts, by hand, and that requests of one client begin alike."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.drills.probes import Readings, Unreadable
from workbench.drills.probes_time import found_share, prompt_rows_a_request
from workbench.traffic import BEGINNING_CHARACTERS, beginning_alike, corpus_prompts


class FakeTrace:
    """Steps of rows, each a request and a position; the first step is of before."""

    def __init__(self, steps, prefill):
        rows = [row for step in steps for row in step]
        self.num_rows = len(rows)
        self.columns = {
            "rows/request_ids": np.array([request for request, _ in rows]),
            "rows/positions": np.array([position for _, position in rows]),
            "steps/row_start": np.cumsum([0, *map(len, steps)]),
            "steps/num_prefill_rows": np.array(prefill),
        }


def prompt(request, found, length):
    return [(request, position) for position in range(found, length)]


def readings(steps, prefill):
    return Readings(trace=FakeTrace(steps, prefill), table_now=None, planned={}, ask=list)


def test_what_a_prompt_found_is_told_from_what_it_ran():
    before = [*prompt(0, 7, 20), (1, 50)]
    steps = [before, [*prompt(2, 16, 20), (0, 20)], prompt(3, 0, 8), prompt(3, 8, 12)]
    steps += [[(2, 20), *prompt(4, 32, 36)]]
    seen = readings(steps, [13, 4, 8, 4, 4])
    # Requests 2, 3 and 4 began: 16, 0 and 32 tokens were found, 4, 12 and 4 ran.
    assert found_share(seen, rows=5) == pytest.approx(48 / 68)
    assert prompt_rows_a_request(seen, rows=5) == pytest.approx(20 / 3)


def test_too_few_beginnings_are_said():
    seen = readings([[(0, 3)], [(0, 4), *prompt(1, 0, 5)], [(0, 5), (1, 5)]], [0, 5, 0])
    with pytest.raises(Unreadable, match="too few requests have begun"):
        found_share(seen, rows=2)


def test_the_requests_of_a_client_begin_alike_and_those_of_others_do_not():
    prompts = corpus_prompts(seed=5)
    alike = beginning_alike(prompts, 12)
    heads = [one.text[:BEGINNING_CHARACTERS] for one in alike]
    assert len(set(heads)) == 12 and heads[:12] == heads[12:24] and set(map(len, heads)) == {420}
    for one, plain in zip(alike, prompts, strict=True):
        assert one.domain == plain.domain and one.text.endswith("\n" + plain.text)
