"""What a drill deploys: options, files, ranks and jobs are put back, whatever was done to them."""

from __future__ import annotations

import json

import pytest

from engine.errors import ConfigError, RequestError
from workbench import paths
from workbench.drills.acts import ACTS
from workbench.drills.deployment import Deployment, Extent
from workbench.drills.hands import Hands
from workbench.drills.jobs import Auditor, Job, Rebalancer, job
from workbench.drills.proof import compared, hashes
from workbench.drills.weights_file import rename

MODEL = paths.model_folder(paths.DEFAULT_MODEL)


@pytest.fixture
def deployment():
    auditor = Auditor("auditor")
    made = Deployment(Extent({"num_devices": 2}, files=True, jobs=[auditor]), MODEL)
    made.open()
    yield made
    made.close()


def test_options_files_jobs_and_crashes_are_put_back(deployment):
    before = hashes(deployment)
    assert deployment.folder != MODEL
    assert deployment.restart(max_running=2).startswith("the engine was started again")
    assert deployment.facts()["options"]["max_running"] == "2"
    assert "drill" not in deployment.facts()["options"] | deployment.facts()["instances"][0]
    assert deployment.engine.config.max_running == 2
    weights = deployment.folder / "model.safetensors"
    rename(weights, "model.norm.weight", "model.norm.weigth")
    (deployment.folder / "left-over").write_text("x")
    deployment.jobs["auditor"].stop()
    assert "did not start" in deployment.restart() and deployment.engine is None
    assert deployment.facts()["starts"][-1]["ok"] is False
    with pytest.raises(RequestError, match="does not run"):
        deployment.require()
    deployment.restore()
    proof = compared(before, hashes(deployment))
    assert proof["restored"], proof
    assert set(proof["hashes"]) == {"weights", "table", "policy", "ranks", "options", "files"}
    assert deployment.jobs["auditor"].running and not (deployment.folder / "left-over").exists()
    deployment.crashed("it was told to.")
    assert not deployment.facts()["running"]
    deployment.restore()
    assert compared(before, hashes(deployment))["restored"]


def test_what_is_no_option_is_refused_and_nothing_has_happened(deployment):
    engine = deployment.engine
    with pytest.raises(ConfigError, match="did you mean 'max_running'.* num_blocks, ") as refused:
        deployment.restart(max_runing=3)
    assert "num_ranks" not in str(refused.value), "it stays as it is in a drill"
    with pytest.raises(ConfigError, match="max_running"):
        deployment.restart(max_running=0)
    assert deployment.engine is engine and deployment.starts == []


def test_a_fault_outlives_a_restart_until_it_is_healed(deployment):
    deployment.inject("gate.lock", lambda value: value, 60.0)
    deployment.restart()
    assert deployment.engine.faults.active() == ("gate.lock",)
    deployment.restore()
    assert deployment.engine.faults.active() == ()


def test_the_manifest_follows_what_is_written(deployment):
    deployment.write_model("num_experts_per_tok", 4)
    config = json.loads((deployment.folder / "config.json").read_text())
    assert config["num_experts_per_tok"] == 4
    deployment.restart()
    assert deployment.engine.model_config.top_k == 4


def hands_of(deployment):
    return Hands(deployment, None, None, None, None)


def test_what_cannot_be_fetched_or_is_done_already_is_said(deployment):
    hands = hands_of(deployment)
    with pytest.raises(ConfigError, match=r"nothing\.md\) is not published.* config\.json, "):
        ACTS["fetch"](hands, None, "nothing.md")
    assert ACTS["start-job"](hands, None, "auditor") == (
        "auditor is running already; nothing was done"
    )
    ACTS["stop-job"](hands, None, "auditor")
    assert ACTS["start-job"](hands, None, "auditor") == "auditor has started"
    assert deployment.jobs["auditor"].running


def test_of_two_instances_it_is_said_which_was_started_again():
    two = Deployment(Extent({"num_devices": 2}, instances=2), MODEL)
    two.open()
    try:
        assert two.restart(1).startswith("instance 1 was started again")
        assert two.restart(0).startswith("instance 0 was started again")
    finally:
        two.close()


class Recent:
    num_rows = 10

    def expert_counts(self):
        return "counts"


def test_a_rebalancer_plans_when_enough_has_run_and_not_while_it_hangs():
    planned, one = [], Rebalancer("r", every_rows=100)
    one.running = True
    for _ in range(5):
        one.tick(Recent, 30, lambda load, spare: planned.append((load, spare)))
    assert planned == [("counts", 1)] and one.runs == 1
    one.hung = True
    for _ in range(5):
        one.tick(Recent, 100, lambda load, spare: planned.append((load, spare)))
    assert len(planned) == 1
    one.stop()
    assert not one.hung and not one.running


def test_a_job_of_no_kind_or_with_strange_options_is_refused():
    assert isinstance(job({"kind": "auditor", "name": "a"}), Job)
    with pytest.raises(ConfigError, match="did you mean 'auditor'"):
        job({"kind": "auditr", "name": "a"})
    with pytest.raises(ConfigError, match="job a: .*speed"):
        job({"kind": "auditor", "name": "a", "speed": 3})


def test_a_tensor_that_gets_its_name_back_is_the_same_file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes((MODEL / "model.safetensors").read_bytes())
    before = path.read_bytes()
    rename(path, "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.router.weight")
    assert path.read_bytes() != before
    with pytest.raises(ConfigError, match="did you mean"):
        rename(path, "model.layers.1.mlp.gate.weight", "x")
    with pytest.raises(ConfigError, match="already"):
        rename(path, "model.layers.1.mlp.router.weight", "model.layers.2.mlp.gate.weight")
    rename(path, "model.layers.1.mlp.router.weight", "model.layers.1.mlp.gate.weight")
    assert path.read_bytes() == before
