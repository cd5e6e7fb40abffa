"""The page Drills and a service that others use: only safe drills, its own acts, no key shown."""

from __future__ import annotations

import re
from typing import Any

import pytest

import workbench.drills
from dashboards import acts
from dashboards.drill_room import NONE, RUNNING
from engine.errors import MachineError
from tests.dashboards.fake_drill import COUNTS, FakeDrill, visit
from workbench.drills.acts_service import ACTS, offered
from workbench.drills.files import scenarios

URL, KEY = "http://127.0.0.1:8000", "trw-not-to-be-shown"
THERE = ("target", {"drill": "lock-contention", "url": URL, "key": KEY})
SAFE = {one.id: one.safe for one in scenarios() if one.safe}


class FakeServiceDrill(FakeDrill):
    """Answers like a drill on a service."""

    def observe(self) -> dict[str, Any]:
        facts = {
            "service": URL, "table_version": 7, "running": True, "starts": [], "ranks": {},
            "jobs": [], "instances": [{"service": URL}],
        }  # fmt: skip
        seen = super().observe()
        return seen | {"table": None, "device_rows": [], "deployment": facts}


@pytest.fixture
def there(drill, monkeypatch) -> FakeServiceDrill:
    briefing = SAFE["lock-contention"].scenario.briefing
    more = {"target": URL, "layers": [1, 3], "acts": offered(ranks=False, jobs=True)}
    fake = FakeServiceDrill(briefing | more)
    fake.asked = []

    def start(drill_id: str, **options: Any) -> FakeServiceDrill:
        fake.asked.append((drill_id, options))
        return fake

    monkeypatch.setattr(workbench.drills, "start", start)
    return fake


def test_only_drills_that_are_safe_may_be_chosen_for_a_service(source, drill):
    skeleton = visit(source).page.skeleton
    assert set(re.findall(r'<option value="([^"]+)"', skeleton)) == set(SAFE)
    assert "(needs 3 ranks)" in skeleton and 'type="password" autocomplete="off"' in skeleton


def test_a_drill_on_a_service_gets_address_and_key_and_shows_the_key_nowhere(source, there):
    page = visit(source, THERE)
    ((drill_id, options),) = there.asked
    assert drill_id == "lock-contention" and page.room.phase == RUNNING
    assert (options["target"], options["key"]) == (URL, KEY)
    shown = (
        page.page.skeleton + str(page.page.values) + str(vars(page.room)) + str(vars(page.turns))
    )
    assert KEY not in shown
    assert (
        URL in page.page.values["engine"] and "engine of its own" not in page.page.values["engine"]
    )


def test_the_acts_of_a_service_are_offered_and_no_others(source, there):
    page = visit(source, THERE, ("act", {"act": "stop-job", "name": "route-auditor"}))
    forms = set(re.findall(r'name="act" value="([^"]+)"', page.page.skeleton))
    assert forms == set(offered(ranks=False, jobs=True)) and "publish" not in forms
    visit(source, ("act", {"act": "publish"}), ("act", {"act": "drain", "rank": "1"}))
    assert there.calls == [("stop-job", {"name": "route-auditor"})]


def test_acts_that_need_ranks_or_jobs_are_offered_where_there_are_some():
    assert offered(ranks=True, jobs=True) == list(ACTS)
    alone = set(offered(ranks=False, jobs=False))
    assert set(ACTS) - alone == {"exchange", "drain", "add-rank", "replace-slowest", "stop-job"}
    forms = acts.forms({"id": "straggler", "target": URL, "acts": ["drain"]})
    assert [(form.name, [field.name for field in form.fields]) for form in forms] == [
        ("drain", ["rank"])
    ]


def test_what_a_service_does_not_tell_is_not_called_missing(source, there):
    page = visit(source, THERE)
    values = page.page.values
    assert values["table"] == "v7" and values["runs"] == "✓ runs"
    assert 'data-child="second"' not in page.page.skeleton
    assert page.map.spec.rows == ("1", "3") and len(COUNTS) == 2


def test_a_service_that_refuses_leads_back_to_the_list_with_its_reason(source, drill, monkeypatch):
    def refuse(_: str, **options: Any) -> None:
        raise MachineError(f"{options['target']} wants a key.")

    monkeypatch.setattr(workbench.drills, "start", refuse)
    page = visit(source, THERE)
    assert page.room.phase == NONE and page.page.values["reason"] == f"{URL} wants a key."


def test_a_drill_that_is_not_safe_is_refused_there(source, drill, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("workbench.drills.client._check_service", None)
    with pytest.raises(Exception, match="not marked safe"):
        workbench.drills.start("hot-expert", target=URL, key=KEY)
