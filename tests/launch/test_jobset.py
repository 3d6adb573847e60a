"""launch/jobset.yaml is a JobSet whose pods find each other, and begin again together."""

import pytest
import yaml
from processes import ROOT

from coat_jax.cli.train import STOPPED
from coat_jax.training.cluster.distributed import find_place
from coat_jax.training.config_files import SHIPPED


def at(tree, path):
    for key in filter(None, path.split(".")):
        tree = tree[int(key) if key.isdecimal() else key]
    return tree


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def job(jobset):
    return at(jobset, "spec.replicatedJobs.0.template.spec")


@pytest.fixture(scope="module")
def container(job):
    (container,) = at(job, "template.spec.containers")
    return container


def test_it_is_a_jobset(jobset):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_pods_find_each_other(jobset, job, container):
    """Each process has a place, and the coordinator is the pod of process 0."""
    assert job["completionMode"] == "Indexed"
    variables = {v["name"]: v.get("value") for v in container["env"]}
    (index,) = [v["valueFrom"] for v in container["env"] if "valueFrom" in v]
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index == {"fieldRef": {"fieldPath": annotation}}
    name, of_job = jobset["metadata"]["name"], at(jobset, "spec.replicatedJobs.0.name")
    port = container["ports"][0]["containerPort"]
    coordinator = f"{name}-{of_job}-0-0.{name}:{port}"
    for process in range(job["completions"]):
        place = find_place(variables | {"JAX_PROCESS_ID": str(process)})
        wanted = (coordinator, job["parallelism"], process, [], "deactivate")
        assert tuple(place.values()) == wanted
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True


def test_all_begin_again_together_and_a_stop_does_not_count(jobset, job, container):
    assert at(job, "template.spec.terminationGracePeriodSeconds") >= 300  # to save
    assert job["backoffLimit"] == 0
    assert at(job, "template.spec.restartPolicy") == "Never"  # as podFailurePolicy requires
    (stopped,) = job["podFailurePolicy"]["rules"]
    assert stopped["action"] == "FailJob"
    codes = {"containerName": container["name"], "operator": "In", "values": [STOPPED]}
    assert stopped["onExitCodes"] == codes
    (rule,) = at(jobset, "spec.failurePolicy.rules")
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_volumes_are_mounted_where_the_run_is_written(job, container):
    volumes = {volume["name"] for volume in at(job, "template.spec.volumes")}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == volumes
    out = container["command"][container["command"].index("--out") + 1]
    assert out.startswith(mounts["runs"])
    config = container["command"][2]
    assert container["command"][:2] == ["coat", "train"]
    assert config in SHIPPED
