"""The quick reference: every drill in it, the same in README as the files say."""

from __future__ import annotations

import pytest

from tests.drills.conftest import ALL
from workbench.drills.reference import BEGIN, END, block, holders, table, write


def test_every_drill_has_a_line_with_symptom_signals_cause_and_repair():
    lines = table().splitlines()
    assert lines[0].count("|") == 6 and len(lines) == len(ALL) + 2
    for drill in ALL:
        (line,) = [line for line in lines if line.endswith(f"| `{drill}` |")]
        assert line.count("|") == 6 and all(cell.strip() for cell in line.split("|")[1:-1])


@pytest.mark.parametrize("holder", holders(), ids=lambda path: path.name)
def test_who_holds_it_says_what_the_files_say(holder):
    assert block() in holder.read_text("utf-8"), "run `workbench drill reference --write`"


def test_readme_folds_the_solutions_away_under_a_warning():
    text = holders()[0].read_text("utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    assert before.rstrip().endswith("the solutions of all drills</summary>")
    assert after.lstrip().startswith("</details>")
    assert text.count("also run on a service that") == 1


def test_writing_puts_it_between_the_marks_and_leaves_the_rest(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert write(page) and not write(page)
    assert page.read_text() == f"before\n{block()}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place"):
        write(page)
