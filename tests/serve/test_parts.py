"""The small parts on their own: rate, audit log, chat format, placement, journal."""

from __future__ import annotations

import json
import logging

import pytest

from engine.checkpoint.load import read_config
from engine.errors import CheckpointError, ConfigError
from engine.events import Filtered, RequestEvent, TextEvent
from engine.routing.placement import contiguous
from engine.serve.audit import Audit, Entry
from engine.serve.chat import ChatFormat
from engine.serve.errors import ApiError
from engine.serve.journal import Journal
from engine.serve.placement import placement_lines
from engine.serve.rate import MAX_CALLERS, Rate
from engine.serve.watch import without_texts
from tests.serve.conftest import MODEL


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_bucket_empties_and_fills():
    clock = Clock()
    rate = Rate(60, clock)
    assert [rate.allows("a") for _ in range(61)] == [True] * 60 + [False]
    assert rate.spent("a") and not rate.spent("b") and rate.allows("b")
    clock.now = 2.5
    assert [rate.allows("a") for _ in range(3)] == [True, True, False]


def test_buckets_are_bounded():
    rate = Rate(60)
    for caller in range(3 * MAX_CALLERS):
        rate.allows(str(caller))
    assert len(rate._buckets) == MAX_CALLERS


def test_the_audit_log_turns_over(tmp_path):
    file = tmp_path / "sub" / "audit.jsonl"
    audit = Audit(file, max_bytes=2000, kept=2)
    for number in range(50):
        audit.write(Entry(source="127.0.0.1", operation=f"GET /{number}", outcome="200"))
    audit.close()
    names = sorted(path.name for path in file.parent.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(path.stat().st_size <= 2000 for path in file.parent.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in file.parent.iterdir())
    last = json.loads(file.read_text().splitlines()[-1])
    assert last["operation"] == "GET /49"
    assert set(last) == {
        "time",
        "source",
        "key",
        "operation",
        "input_bytes",
        "outcome",
        "duration_ms",
    }


def test_an_audit_log_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="audit_log"):
        Audit(tmp_path / "file" / "audit.jsonl")


def chat(tmp_path, template, **words):
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, **words}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatFormat(tmp_path)


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_a_models_own_chat_template_is_used(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert chat(tmp_path, template).render(MESSAGES) == "<s>[system]be brief\n[user]hi\n[assistant]"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert ChatFormat(tmp_path).render(MESSAGES) == "2"


def test_without_a_template_the_messages_follow_one_another():
    assert ChatFormat(MODEL).render(MESSAGES) == "be brief\nhi"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ messages[9].content.x.y }}",
     "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages[0].content + 1 }}"],
)  # fmt: skip
def test_a_template_that_fails_or_reaches_out_refuses_the_request(tmp_path, template):
    with pytest.raises(ApiError) as refused:
        chat(tmp_path, template).render(MESSAGES)
    assert refused.value.status == 400


def test_a_broken_template_is_the_folders_fault(tmp_path):
    with pytest.raises(CheckpointError, match="chat template"):
        chat(tmp_path, "{% for %}")


def test_the_placement_is_told_by_device():
    model = read_config(MODEL)
    lines = placement_lines(model, contiguous(4, 8, 2), ranks=True)
    each = 3 * 256 * 256
    assert lines[0] == (
        f"rank 0: experts 0-3 in each of 4 MoE layers, {16 * each:,} parameters (50.0%)"
    )
    uneven = placement_lines(model, contiguous(4, 8, 3), ranks=False)
    assert [line.split("(")[1] for line in uneven] == ["37.5%)", "37.5%)", "25.0%)"]


def test_what_is_written_and_asked_does_not_leave_for_those_who_watch():
    heard = []

    class Sink:
        enabled = True
        emit = staticmethod(heard.append)

    quiet = Filtered(Sink(), without_texts)
    quiet.emit(TextEvent(1, "http", "attack", 3, False, 0.0))
    quiet.emit(RequestEvent(1, "added", "http", 0.0, (5, 6)))
    assert heard == [
        TextEvent(1, "http", "", 3, False, 0.0),
        RequestEvent(1, "added", "http", 0.0, ()),
    ]


def test_the_journal_counts_tracebacks_and_repeats_no_argument(apart):
    with Journal() as journal:
        log = logging.getLogger("engine.serve")
        log.warning("something odd")
        try:
            raise ValueError("attack at dawn")
        except ValueError as failure:
            log.error("it failed", exc_info=failure)
    log.error("nobody listens any more")
    told = journal.summary()
    assert told["tracebacks"] == 1 and told["levels"] == {"WARNING": 1, "ERROR": 1}
    assert [one["exception"] for one in told["last"]] == [None, "ValueError"]
    assert "attack" not in json.dumps(told)
