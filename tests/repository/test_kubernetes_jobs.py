"""The manifests for JobSet and Kubeflow Trainer, checked against the schemas that Kubeflow publishes as a package.

`kubeflow_trainer_api` has the models of TrainJob, ClusterTrainingRuntime, JobSet and of all that they contain, which
are generated from the custom resource definitions. A model ignores a key that it does not know, so keys are checked
here too.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any, get_args, get_origin

import pytest

from .test_deploy import DEPLOY, image_user, objects, parsed
from .test_deploy import container as plain_container
from .test_deploy import pod as plain_pod

SITE = DEPLOY / "kubernetes" / "site.yaml"
JOBSET = DEPLOY / "kubernetes" / "jobset" / "site.yaml"
RUNTIME = DEPLOY / "kubernetes" / "kubeflow-trainer" / "runtime.yaml"
TRAINJOB = DEPLOY / "kubernetes" / "kubeflow-trainer" / "site.yaml"
MANIFESTS = [JOBSET, RUNTIME, TRAINJOB]
SCHEMAS = {  # which model of the package an object is
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): "TrainerV1alpha1ClusterTrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
}
Object = dict[str, Any]


def of_kind(path: Path, kind: str) -> Object:
    (one,) = [one for one in objects(path) if one["kind"] == kind]
    found: Object = one
    return found


def unknown_keys(value: object, kind: Any, place: str = "") -> list[str]:
    """The keys that a model does not have, anywhere in a value."""
    if isinstance(value, list):
        return [key for number, one in enumerate(value) for key in unknown_keys(one, kind, f"{place}[{number}]")]
    maps = [get_args(one)[1] for one in _inside(kind) if get_origin(one) is dict]
    if isinstance(value, dict) and maps:  # such as labels, whose keys are free
        return [key for name, one in value.items() for key in unknown_keys(one, maps[0], f"{place}.{name}")]
    models = [one for one in _inside(kind) if hasattr(one, "model_fields")]
    if not isinstance(value, dict) or not models:
        return []
    fields = {field.alias or name: field for name, field in models[0].model_fields.items()}
    found = [f"{place}.{key}" for key in value if key not in fields]
    for key, inside in value.items():
        if key in fields:
            found += unknown_keys(inside, fields[key].annotation, f"{place}.{key}")
    return found


def _inside(kind: Any) -> list[Any]:
    """A type and all types in it: of `Optional[List[Volume]]`, Volume too."""
    return [kind, *(one for part in get_args(kind) for one in _inside(part))]


@pytest.fixture(scope="module")
def models() -> Any:
    return pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: schemas are not checked"
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_objects_follow_the_published_schemas(path: Path, models: Any) -> None:
    checked = 0
    for one in objects(path):
        name = SCHEMAS.get((one["apiVersion"], one["kind"]))
        if name is None:
            assert one["kind"] in ("PersistentVolumeClaim", "NetworkPolicy"), "test_deploy knows these"
            continue
        checked += 1
        model = getattr(models, name)
        assert unknown_keys(one, model) == []
        assert model.from_dict(one).spec is not None
    assert checked == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda spec: spec.update(replicatedJob=[]), ".spec.replicatedJob"),
        (lambda spec: spec["failurePolicy"].update(maxRestart=3), ".spec.failurePolicy.maxRestart"),
        (
            lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].update(volume=[]),
            ".spec.replicatedJobs[0].template.spec.template.spec.volume",
        ),
    ],
)
def test_a_misspelt_key_is_noticed(change: Any, says: str, models: Any) -> None:
    one = of_kind(JOBSET, "JobSet")
    change(one["spec"])
    assert unknown_keys(one, models.JobsetV1alpha2JobSet) == [says]


def test_a_wrong_type_is_noticed(models: Any) -> None:
    one = of_kind(TRAINJOB, "TrainJob")
    one["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict(one)


# -- what the schemas cannot know -------------------------------------------------------------


def replicated_job(path: Path) -> Object:
    spec = of_kind(path, "JobSet" if path == JOBSET else "ClusterTrainingRuntime")["spec"]
    (job,) = (spec if path == JOBSET else spec["template"]["spec"])["replicatedJobs"]
    found: Object = job
    return found


def pod(path: Path) -> Object:
    found: Object = replicated_job(path)["template"]["spec"]["template"]["spec"]
    return found


def container(path: Path) -> Object:
    (one,) = pod(path)["containers"]
    found: Object = one
    return found


both = pytest.mark.parametrize("path", [JOBSET, RUNTIME], ids=lambda path: path.parent.name)


@both
def test_a_pod_is_that_of_the_plain_manifest(path: Path) -> None:
    for key in ("securityContext", "automountServiceAccountToken", "terminationGracePeriodSeconds"):
        assert pod(path)[key] == plain_pod(SITE)[key]
    for key in ("image", "command", "resources", "securityContext", "volumeMounts"):
        assert container(path)[key] == plain_container(SITE)[key]
    assert [volume["name"] for volume in pod(path)["volumes"]] == [
        volume["name"] for volume in plain_pod(SITE)["volumes"]
    ]
    assert pod(path)["securityContext"]["runAsUser"] == image_user()
    assert {one["name"] for one in container(path)["env"]} >= {one["name"] for one in plain_container(SITE)["env"]}
    assert pod(path)["restartPolicy"] == "Never", "a restarted torchrun alone would wait for the others for ever"
    assert replicated_job(path)["template"]["spec"]["backoffLimit"] == 0, "JobSet restarts all of them instead"


def words(path: Path) -> list[str]:
    """The command that runs in a pod."""
    if path == TRAINJOB:
        trainer = of_kind(path, "TrainJob")["spec"]["trainer"]
        return [*trainer["command"], *trainer["args"]]
    return [*container(path)["command"], *container(path)["args"]]


@pytest.mark.parametrize("path", [JOBSET, TRAINJOB], ids=lambda path: path.parent.name)
def test_the_command_exists_and_its_paths_are_mounted(path: Path) -> None:
    params = parsed(words(path))
    assert params["site"] == "virginia"
    mounts = {mount["mountPath"]: mount for mount in container(JOBSET if path == JOBSET else RUNTIME)["volumeMounts"]}
    for option, mount in (
        ("recipe", "/etc/weightgrad/recipe"),
        ("credentials", "/etc/weightgrad/site"),
        ("state", "/var/lib/weightgrad"),
    ):
        assert PurePosixPath(str(params[option])).is_relative_to(mount)
        assert bool(mounts[mount].get("readOnly")) == (option != "state")
    (claim,) = [one for one in objects(path) if one["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "more than one pod has it"


def test_the_pods_of_a_jobset_find_each_other() -> None:
    one = of_kind(JOBSET, "JobSet")
    name, subdomain = one["metadata"]["name"], one["spec"]["network"]["subdomain"]
    job = replicated_job(JOBSET)
    arguments = dict(word.removeprefix("--").partition("=")[::2] for word in words(JOBSET) if word.startswith("--"))
    assert arguments["rdzv-endpoint"] == f"{name}-{job['name']}-0-0.{subdomain}:29400"
    nodes = int(arguments["nnodes"])
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == nodes > 1
    assert job["template"]["spec"]["completionMode"] == "Indexed", "or pods have no names"
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container(JOBSET)["env"] if "valueFrom" in one
    }
    assert fields == {"POD_IP": "status.podIP"}
    assert arguments["local-addr"] == "$(POD_IP)"


def test_a_trainjob_is_one_of_its_runtime() -> None:
    runtime, job = of_kind(RUNTIME, "ClusterTrainingRuntime"), of_kind(TRAINJOB, "TrainJob")
    group = runtime["apiVersion"].partition("/")[0]
    name = runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"] == {"apiGroup": group, "kind": runtime["kind"], "name": name}
    # What the Trainer looks for: the framework, the job that trains, and its container.
    assert runtime["metadata"]["labels"] == {f"{group}/framework": "torch"}
    assert replicated_job(RUNTIME)["template"]["metadata"]["labels"] == {f"{group}/trainjob-ancestor-step": "trainer"}
    assert replicated_job(RUNTIME)["name"] == container(RUNTIME)["name"] == "node"
    claims = [one["metadata"]["name"] for one in objects(TRAINJOB) if one["kind"] == "PersistentVolumeClaim"]
    assert claims == [
        v["persistentVolumeClaim"]["claimName"]
        for v in pod(RUNTIME)["volumes"]
        if len(v) == 2 and "persistentVolumeClaim" in v
    ]
    assert not [word for word in words(TRAINJOB) if re.match("--(nnodes|nproc|rdzv|standalone|master)", word)], (
        "PET_* say it"
    )


@pytest.mark.parametrize("path", [JOBSET, TRAINJOB], ids=lambda path: path.parent.name)
def test_pods_of_a_site_may_talk_to_each_other_and_to_the_server(path: Path) -> None:
    spec = of_kind(path, "NetworkPolicy")["spec"]
    labels = replicated_job(JOBSET if path == JOBSET else RUNTIME)["template"]["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    among = {"podSelector": spec["podSelector"]}
    assert spec["ingress"] == [{"from": [among]}]
    assert spec["egress"][0] == {"to": [among]}
    assert {port["port"] for rule in spec["egress"][1:] for port in rule["ports"]} == {7443, 53}
