"""What a drill's window counts, forgets and keeps apart."""

from __future__ import annotations

from dataclasses import replace

from workbench.drills.probes_deploy import rows_since_plan
from workbench.drills.readings import Readings
from workbench.drills.window import Window
from workbench.trace.synthetic import start_event, step_event

START = start_event()


def run(window, steps, version):
    for step in range(steps):
        window.emit(replace(step_event(START, step, 10), table_version=version))


def test_rows_of_a_table_are_counted_over_acts_that_publish_none():
    window = Window(max_rows=50)
    window.emit(START)
    run(window, 3, version=0)
    assert window.rows_of_table == 30
    run(window, 9, version=1)
    window.clear()  # as after every act
    run(window, 2, version=1)
    with window.closed():
        run(window, 5, version=1)
    assert window.num_rows == 20 and window.rows_of_table == 110, "more than the window keeps"
    seen = Readings(window.trace(), None, {}, list, rows_of_table=window.rows_of_table)
    assert rows_since_plan(seen, rows=20) == 110
    window.emit(START)  # another engine begins with the table it was given
    run(window, 1, version=1)
    assert window.rows_of_table == 10
