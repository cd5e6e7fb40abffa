"""`workbench generate`: its report adds up, and what it cannot do it says in one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from engine.events import CAUSES
from workbench import paths
from workbench.report import EXTRA, balance
from workbench.trace import load

PROMPT = "Wählen Sie den Befehl"


@pytest.fixture(scope="module")
def engine():
    from engine import Engine, EngineConfig

    engine = Engine(EngineConfig(model=paths.model_folder(paths.DEFAULT_MODEL)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def long_text(engine):
    """Return a function that gives a text of exactly n tokens, bos included."""

    def text(num_tokens: int) -> str:
        made = "7" * (num_tokens - 1)
        assert len(engine.tokenizer.encode(made)) == num_tokens
        return made

    return text


def test_json_adds_up(workbench, engine):
    report = workbench("generate", PROMPT, "--max-tokens", "6", "--json").json
    assert set(report) == {
        "text",
        "token_ids",
        "prompt_token_ids",
        "prompt_tokens",
        "completion_tokens",
        "finish_reason",
        "tokens_per_second",
        "logits_sha256",
        "precision",
        "draft",
        "routing",
    }
    assert report["precision"] == "all in float32, the gate in float32"
    assert report["prompt_token_ids"] == engine.tokenizer.encode(PROMPT)
    assert report["prompt_tokens"] == len(report["prompt_token_ids"])
    assert report["completion_tokens"] == len(report["token_ids"]) == 6
    assert report["text"] == engine.tokenizer.decode(report["token_ids"])
    assert report["finish_reason"] == "length"
    assert report["tokens_per_second"] > 0
    assert len(bytes.fromhex(report["logits_sha256"])) == 32
    routing = report["routing"]
    rows = report["prompt_tokens"] + 6 - 1
    assert routing["rows"] == rows and routing["extra_rows"] == {}
    counts_LE = np.array(routing["expert_counts"])
    assert counts_LE.shape == (routing["layers"], routing["experts"]) == (4, 8)
    assert counts_LE.sum(-1).tolist() == [rows * routing["top_k"]] * 4
    assert 0 < routing["overhead_share"] < 1
    assert routing["balance"]["value"] == pytest.approx(balance(counts_LE))
    assert "max(expert_counts) / mean(expert_counts)" in routing["balance"]["formula"]


def test_without_new_tokens_only_the_prompt_runs(workbench):
    report = workbench("generate", PROMPT, "--max-tokens", "0", "--json").json
    assert report["text"] == "" and report["token_ids"] == []
    assert report["routing"]["rows"] == report["prompt_tokens"]


def test_the_same_command_gives_the_same_logits(workbench):
    words = ("generate", PROMPT, "--max-tokens", "4", "--deterministic", "--json")
    one, other = workbench(*words).json, workbench(*words, "--devices", "4").json
    assert one["logits_sha256"] == other["logits_sha256"]


def test_text_goes_to_stdout_and_the_summary_to_stderr(workbench):
    said = workbench("generate", PROMPT, "--max-tokens", "6")
    report = workbench("generate", PROMPT, "--max-tokens", "6", "--json").json
    assert said.code == 0 and said.out == report["text"] + "\n"
    assert "6 tokens after the prompt in" in said.err and "balance" in said.err


def test_rows_beside_the_text_are_named_by_what_became_of_them(workbench):
    words = ("--draft", "polyglot-draft", "--draft-length", "fixed", "--max-tokens", "12")
    thrown = workbench("generate", PROMPT, *words, "--json").json["routing"]["extra_rows"]
    assert thrown["rejected_draft"] > 0
    said = workbench("generate", PROMPT, *words).err
    assert f"(+{thrown['rejected_draft']} thrown away, of rejected drafts)" in said
    assert "run again" not in said
    assert EXTRA.keys() | {"accepted"} == set(CAUSES)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--smoothing", "0.5"), "silent under smoothing"),
        (("--capacity-factor", "1.5"), "silent under a capacity factor"),
    ],
)
def test_a_draft_that_may_not_propose_says_why(workbench, words, why):
    words = ("--draft", "polyglot-draft", "--draft-length", "fixed", "--max-tokens", "4", *words)
    report = workbench("generate", PROMPT, *words, "--json").json["draft"]
    assert (report["proposed"], report["silent"]) == (0, why)
    assert (
        f"draft polyglot-draft: no token proposed, {why}"
        in workbench("generate", PROMPT, *words).err
    )


def test_an_option_of_drafts_without_a_draft_is_said_to_do_nothing(workbench):
    words = ("--max-tokens", "1", "--draft-length", "fixed", "--draft-tokens", "2")
    said = workbench("generate", PROMPT, *words)
    assert said.code == 0
    assert "without --draft there is nothing to do for --draft-tokens, --draft-length" in said.err


def test_the_prompt_may_come_from_stdin_or_a_file(workbench, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(f"{PROMPT}\n".encode())
    words = ("--max-tokens", "2", "--json")
    texts = [
        workbench("generate", PROMPT, *words).json["prompt_token_ids"],
        workbench("generate", "-", *words, stdin=f"{PROMPT}\n".encode()).json["prompt_token_ids"],
        workbench("generate", "--prompt-file", file, *words).json["prompt_token_ids"],
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_seed_repeats_a_sampled_text_and_another_changes_it(workbench):
    def sample(seed: int) -> list[int]:
        words = ("--temperature", "1.5", "--seed", str(seed), "--max-tokens", "12", "--json")
        return workbench("generate", PROMPT, *words).json["token_ids"]

    assert sample(1) == sample(1) != sample(2)


def test_a_stop_string_ends_the_text_and_stays_out_of_it(workbench):
    free = workbench("generate", PROMPT, "--max-tokens", "12", "--json").json["text"]
    stop = free[len(free) // 2 :][:3]
    report = workbench("generate", PROMPT, "--max-tokens", "12", "--stop", stop, "--json").json
    assert report["finish_reason"] == "stop"
    assert report["text"] == free[: free.index(stop)]


def test_policy_options_reach_the_gate(workbench):
    def counts(*words: str) -> np.ndarray:
        report = workbench("generate", PROMPT, "--max-tokens", "3", "--json", *words).json
        return np.array(report["routing"]["expert_counts"])

    rows = counts().sum(-1)[0] // 2
    forced = counts("--force-experts", "1,3")
    assert (forced[:, [1, 3]] == rows).all() and forced.sum() == 8 * rows
    assert (counts("--ban-expert", "1")[:, 1] == 0).all()
    banned = counts("--ban-expert", "2:0")
    assert banned[2, 0] == 0 and banned[:, 0].any()
    favoured = counts("--bias", "0:5=50")
    assert favoured[0, 5] == rows and favoured[1, 5] < rows


def test_the_trace_holds_every_row(workbench, tmp_path):
    file = tmp_path / "x.moetrace"
    report = workbench("generate", PROMPT, "--max-tokens", "3", "--trace", file, "--json").json
    trace = load(file)
    assert trace.num_rows == report["routing"]["rows"]
    assert trace.expert_counts().tolist() == report["routing"]["expert_counts"]
    assert "".join(text.delta for text in trace.texts) == report["text"]


def test_a_dense_model_reports_no_routing_and_takes_no_policy(workbench):
    words = ("generate", PROMPT, "--max-tokens", "2", "--model", "polyglot-draft", "--json")
    routing = workbench(*words).json["routing"]
    assert (routing["layers"], routing["experts"], routing["top_k"]) == (0, 0, 0)
    assert routing["expert_counts"] == [] and routing["balance"]["value"] is None
    assert workbench(*words[:-1]).code == 0
    workbench(*words, "--ban-expert", "0").assert_refused(2, "dense")


def test_text_as_long_as_the_context_runs_and_longer_is_refused(workbench, engine, long_text):
    limit = engine.max_model_len
    words = ("--max-tokens", "0", "--json")
    for length in (limit - 1, limit):
        assert workbench("generate", long_text(length), *words).json["prompt_tokens"] == length
    for length in (limit + 1, 10 * limit):
        workbench("generate", "-", *words, stdin=long_text(length).encode()).assert_refused(
            2, f"{length} tokens", f"at most {limit}"
        )


def test_more_new_tokens_than_the_context_leaves_are_refused(workbench, engine, long_text):
    limit = engine.max_model_len
    text = long_text(limit - 3)
    report = workbench("generate", text, "--max-tokens", "3", "--json").json
    assert report["prompt_tokens"] == limit - 3
    for max_tokens in ("4", "1000000000"):
        workbench("generate", text, "--max-tokens", max_tokens).assert_refused(2, "at most 3")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("",), "empty"),
        (("-",), "empty"),
        ((), "TEXT"),
        ((PROMPT, "--prompt-file", "x"), "TEXT"),
        (("--prompt-file", "no-such-file"), "No such file"),
        (("--prompt-file", "."), "directory"),
        ((PROMPT, "--max-tokens", "-1"), "max_tokens"),
        ((PROMPT, "--max-tokens", "many"), "many"),
        ((PROMPT, "--temperature", "-0.1"), "temperature"),
        ((PROMPT, "--temperature", "nan"), "temperature"),
        ((PROMPT, "--top-p", "0"), "top_p"),
        ((PROMPT, "--top-k", "-1"), "top_k"),
        ((PROMPT, "--seed", "-1"), "seed"),
        ((PROMPT, "--stop", ""), "stop"),
        ((PROMPT, "--devices", "0"), "num_devices"),
        ((PROMPT, "--dtype", "float16"), "float32, bfloat16"),
        ((PROMPT, "--dtype", "bfloat16", "--deterministic"), "float32"),
        ((PROMPT, "--force-experts", "1;2"), "--force-experts (1;2)"),
        ((PROMPT, "--force-experts", ""), "--force-experts"),
        ((PROMPT, "--ban-expert", "x:1"), "--ban-expert (x:1)"),
        ((PROMPT, "--ban-expert", "-1"), "--ban-expert (-1)"),
        ((PROMPT, "--ban-expert", "8"), "between 0 and 7"),
        ((PROMPT, "--ban-expert", "4:0"), "between 0 and 3"),
        ((PROMPT, "--force-experts", "0,1,2"), "at most top_k"),
        ((PROMPT, "--force-experts", "2,5", "--ban-expert", "2"), "both banned and forced"),
        ((PROMPT, "--bias", "0=1e9"), "between"),
        ((PROMPT, "--smoothing", "101"), "bonus (101.0)"),
        ((PROMPT, "--smoothing", "1,99999999999999"), "1 to 64 tokens"),
        ((PROMPT, "--precision", "fp8"), "precision (fp8) must be one of auto, bf16, int8, model"),
        ((PROMPT, "--precision", "bf16", "--deterministic"), "--precision bf16"),
        ((PROMPT, "--bias", "1"), "--bias (1)"),
        ((PROMPT, "--bias", "1=nan"), "--bias (1=nan)"),
        ((PROMPT, "--colour", "red"), "--colour"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(workbench, words, hint):
    workbench("generate", *words).assert_refused(2, hint)
    workbench("generate", *words, "--json").assert_refused(2, hint)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--model", "no/such/folder"), "no/such/folder does not exist"),
        (("--model", "pyproject.toml"), "is not a folder"),
        (("--trace", "no/such/folder/x.moetrace"), "its folder does not exist"),
        (("--trace", "."), "it is a folder"),
    ],
)
def test_what_does_not_exist_is_one_sentence_and_exit_code_1(workbench, words, hint):
    workbench("generate", PROMPT, *words).assert_refused(1, hint)


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"caf\xe9"])
def test_text_that_is_not_utf8_is_refused(workbench, tmp_path, raw):
    file = tmp_path / "prompt.txt"
    file.write_bytes(raw)
    workbench("generate", "--prompt-file", file).assert_refused(2, "not UTF-8")
    workbench("generate", "-", stdin=raw).assert_refused(2, "not UTF-8")
    workbench("generate", raw.decode(errors="surrogateescape")).assert_refused(2, "not UTF-8")


def test_balance_of_an_even_and_a_skewed_load():
    assert balance(np.array([[4, 4], [2, 2]])) == 1
    assert balance(np.array([[6, 2, 0, 0]])) == 3
    assert balance(np.zeros((2, 4))) is None
    assert balance(np.zeros((0, 0))) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_give_the_logits_and_the_routing_of_one_process(workbench):
    words = ("generate", PROMPT, "--max-tokens", "4", "--deterministic", "--json")
    alone = workbench(*words).json
    spread = workbench(*words, "--ranks", "4", "--exchange", "overlapped").json
    for report in (alone, spread):
        del report["tokens_per_second"], report["routing"]["overhead_share"]
    assert alone["logits_sha256"] and spread == alone
    other = workbench(*words, "--ranks", "2", "--ban-expert", "0").json
    assert other["logits_sha256"] != alone["logits_sha256"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--ranks", "0"), "num_ranks (0)"),
        (("--ranks", "2", "--devices", "3"), "num_devices (3)"),
        (("--exchange", "group"), "exchange (group)"),
    ],
)
def test_ranks_that_cannot_be_are_refused(workbench, words, hint):
    workbench("generate", PROMPT, *words).assert_refused(2, hint)
