"""A draft behind the service: the same answers, its proposals told, and refused if it is wrong."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import httpx
import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.serve.proto import router_pb2 as pb
from engine.serve.rpc import SERVICE
from engine.serve.stages import StartError
from engine.serve.startup import started
from tests.serve.conftest import ENGINE, MODEL, NAME, serve_config, slowly, until
from tests.serve.test_leaving import all_free, opened
from tests.serve.test_observe import scraped

DRAFT = Path(__file__).parents[2] / "data/models/polyglot-draft"
DRAFTING = {"draft": DRAFT, "draft_length": "fixed", "draft_tokens": 3}
EXACT = {"deterministic": True, "hash_logits": True}
COMMON = "7 * 6 = 42\n8 * 6 = 48\n9 * 6 = 54\n"
PROMPTS = [f"{COMMON}{number} * 5 = " for number in range(2, 8)] + ["Der Server", "def f(x):"]


@pytest.fixture(scope="module")
def drafting(make_server, tmp_path_factory):
    """A service that drafts, reuses beginnings, and has room for a few requests only."""
    log = tmp_path_factory.mktemp("draft") / "audit.jsonl"
    tight = {"num_blocks": 26, "block_size": 4, "max_running": 4, "prefix_reuse": True}
    return make_server(tight | DRAFTING | EXACT, audit_log=log, grpc_port=0)


@pytest.fixture(scope="module")
def wanted():
    """What a plain engine makes of each prompt."""
    with closing(Engine(EngineConfig(model=MODEL, **{**ENGINE, **EXACT}))) as engine:
        return engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))


def ask(server, prompt, **options):
    body = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, **options}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def drafts_of(usage):
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    return accepted, accepted + details["rejected_prediction_tokens"]


def audited(server):
    log = server.service.config.audit_log
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["operation"].endswith(("completions", "omplete"))]


def counters(server):
    with httpx.Client(base_url=server.url) as client:
        found = scraped(client)
    return {
        name: found[f"tokenrouter_spec_decode_num_{name}_tokens_total"][()]
        for name in ("accepted", "draft")
    }


def test_answers_are_bitwise_those_without_a_draft_however_crowded_it_is(drafting, wanted):
    before, lines = counters(drafting), len(audited(drafting))
    jobs = [(index, priority) for priority in (0, -2, 3) for index in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: ask(drafting, PROMPTS[job[0]], priority=job[1]), jobs))
    for (index, _), answer in zip(jobs, answers, strict=True):
        (choice,) = answer["choices"]
        assert choice["text"] == wanted[index].text
        assert choice["logits_sha256"] == wanted[index].logits_sha256
        assert answer["usage"]["completion_tokens"] == 12
    assert sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers) > 0
    assert drafting.service.monitor.tally.rows["preemption"] > 0
    told = [drafts_of(answer["usage"]) for answer in answers]
    accepted, proposed = map(sum, zip(*told, strict=True))
    assert 0 < accepted < proposed
    after = counters(drafting)
    assert after["accepted"] - before["accepted"] == accepted
    assert after["draft"] - before["draft"] == proposed
    written = [line["drafts"] for line in audited(drafting)[lines:]]
    assert sum(one["accepted"] for one in written) == accepted
    assert sum(one["proposed"] for one in written) == proposed
    assert all_free(drafting)


def test_a_stream_gets_the_same_text_and_counts_in_its_usage(drafting, wanted):
    body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, "logprobs": 1, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    text = httpx.post(f"{drafting.url}/v1/completions", json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["text"] for choice in choices) == wanted[0].text
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 12
    accepted, proposed = drafts_of(events[-1]["usage"])
    assert 0 < accepted <= proposed and len(choices) < 12


def test_its_rows_and_the_rejected_ones_stand_apart_in_the_answer(drafting):
    answer = ask(drafting, PROMPTS[1], routing={"tokens": True})
    usage, routing = answer["usage"], answer["choices"][0]["routing"]
    accepted, proposed = drafts_of(usage)
    computed = usage["total_tokens"] - 1 - usage["prompt_tokens_details"]["cached_tokens"]
    assert routing["summary"]["rows"] == computed
    assert proposed > accepted and routing["summary"]["extra_rows"] >= proposed - accepted
    assert [token["index"] for token in routing["tokens"]] == list(range(usage["total_tokens"] - 1))


def test_a_caller_who_leaves_ends_what_was_drafted_for_it(drafting):
    before = drafting.service.loop.books.aborted
    with slowly(drafting), closing(opened(drafting, stream=True, max_tokens=60)) as connection:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
    assert until(lambda: all_free(drafting))
    assert drafting.service.loop.books.aborted == before + 1
    assert ask(drafting, PROMPTS[0])["choices"][0]["finish_reason"] == "length"


def test_the_state_names_it_and_tells_its_figures(drafting, client):
    told = httpx.get(f"{drafting.url}/v1/status").json()
    figures = told["engine"]["draft"]
    assert told["draft"] == "polyglot-draft" and figures["accepted"] <= figures["proposed"]
    assert "accepted / proposed" in figures["definition"]
    plain = client.get("/v1/status").json()
    assert plain["draft"] is None and plain["engine"]["draft"] is None


def test_grpc_tells_the_same(drafting, wanted):
    with grpc.insecure_channel(drafting.grpc_address) as channel:
        stub = channel.unary_unary(
            f"/{SERVICE}/Complete",
            lambda message: message.SerializeToString(),
            pb.CompletionResponse.FromString,
        )
        sampling = pb.Sampling(max_tokens=12, temperature=0, ignore_eos=True)
        prompt = pb.Prompt(text=PROMPTS[0])
        asked = pb.CompletionRequest(model=NAME, prompts=[prompt], sampling=sampling)
        answer = stub(asked, timeout=30)
    assert answer.choices[0].logits_sha256 == wanted[0].logits_sha256
    usage, line = answer.usage, audited(drafting)[-1]
    assert line["operation"].endswith("Complete") and usage.accepted_prediction_tokens > 0
    assert line["drafts"] == {
        "accepted": usage.accepted_prediction_tokens,
        "proposed": usage.accepted_prediction_tokens + usage.rejected_prediction_tokens,
    }


def test_without_a_draft_nothing_is_told_of_one(client, complete):
    assert "completion_tokens_details" not in complete().json()["usage"]
    assert "spec_decode" not in client.get("/metrics").text


@pytest.mark.parametrize(
    ("folder", "code", "words"),
    [
        (MODEL, 2, "a draft must be a dense model of family qwen3"),
        (DRAFT / "nowhere", 1, "nowhere"),
        (DRAFT.parent, 1, "config.json"),
    ],
)
def test_a_wrong_draft_is_refused_in_the_first_stage(folder, code, words):
    with pytest.raises(StartError, match=words) as failed:
        with started(serve_config({"draft": folder})):
            pytest.fail("it started")
    assert (failed.value.stage, failed.value.exit_code) == (1, code)


def test_a_draft_with_a_shard_cut_short_is_refused_before_it_listens(tmp_path):
    import shutil

    folder = shutil.copytree(DRAFT, tmp_path / "draft")
    shard = next(folder.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    with pytest.raises(StartError, match=shard.name) as failed:
        with started(serve_config({"draft": folder})):
            pytest.fail("it started")
    assert failed.value.stage == 1


def test_the_command_refuses_a_draft_between_ranks_and_names_both(workbench):
    ended = workbench("serve", "--draft", "polyglot-draft", "--ranks", "2", "--port", "0")
    ended.assert_refused(2, "draft", "num_ranks (2)", "one process only")
