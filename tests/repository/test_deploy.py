"""What operators are given to copy is valid: units, manifests, the Dockerfile, and the commands and messages told."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
from collections.abc import Hashable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from weightgrad.cli import app
from weightgrad.core import strategies
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.site_list import SiteList

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OPERATIONS = ROOT / "docs" / "operations.md"
SECURITY = ROOT / "docs" / "security.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [OPERATIONS, DEPLOY / "systemd" / "README.md", DEPLOY / "kubernetes" / "README.md"]
GUIDES = [TUTORIAL, ROOT / "docs" / "compare.md"]
VENV = "/srv/weightgrad/venv/bin/"
VALUES = {  # what a unit's EnvironmentFile sets
    "RECIPE": "/etc/weightgrad/run.yaml",
    "LISTEN": "0.0.0.0:7443",
    "METRICS": "127.0.0.1:7444",
    "SERVER": "global.example.org:7443",
    "WORKERS": "2",
}


# -- commands --------------------------------------------------------------------------------


def parsed(command: list[str]) -> dict[str, Any]:
    """The parameters of a `weightgrad ...` or `torchrun ... -m weightgrad ...`, read by the very parsers; else {}."""
    program, arguments = PurePosixPath(command[0]).name, command[1:]
    if program == "torchrun":
        run = get_args_parser().parse_args(arguments)
        if not run.module:
            assert run.training_script.endswith(".py")
            return {}
        program, arguments = run.training_script, run.training_script_args
    assert program == "weightgrad", command
    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands"):
        name, *arguments = arguments
        found = found.get_command(None, name)
        assert found is not None, f"no command {name} in {' '.join(command)}"
    params: dict[str, Any] = found.make_context(found.name, arguments).params
    return params


@pytest.mark.parametrize(
    "command",
    [
        "weightgrad sirve run.yaml",
        "weightgrad serve run.yaml --no-such-option",
        "weightgrad train run.yaml --server localhost:7443",
        "torchrun --no-such-option 2 -m weightgrad train run.yaml --site a",
        "torchrun --nproc-per-node 2 -m weightgrad train run.yaml --site a --stat x",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        parsed(shlex.split(command))


def told_commands(page: Path) -> Iterator[list[str]]:
    """The lines of a page's shell blocks that are for us."""
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        block = re.sub(r"<<'END'\n.*?^END$", "", block, flags=re.MULTILINE | re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["sudo", "-u"]:
                words = words[3:]
            while words and (words[0] in ("sudo", "env") or re.fullmatch(r"[A-Z_]+=.*", words[0])):
                words = words[1:]
            if words and PurePosixPath(words[0]).name in ("weightgrad", "torchrun"):
                yield words


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_a_page_can_be_typed(page: Path) -> None:
    commands = list(told_commands(page))
    assert commands
    for command in commands:
        parsed(command)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.parent.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page} links to {target}"


# -- systemd ---------------------------------------------------------------------------------


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Sections, keys and all their values; a line may go on in the next, a key may come often."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] | None = None
    for line in path.read_text().replace("\\\n", " ").splitlines():
        text = line.strip()
        if not text or text[0] in "#;":
            continue
        if text.startswith("["):
            assert text.endswith("]"), line
            assert text[1:-1] not in found, f"two sections {text}"
            section = found.setdefault(text[1:-1], {})
            continue
        key, equals, value = text.partition("=")
        assert section is not None, line
        assert equals, line
        assert re.fullmatch("[A-Za-z]+", key), line
        section.setdefault(key, []).append(value.strip())
    return found


def unit_command(path: Path) -> list[str]:
    """What ExecStart runs once systemd has filled it in."""
    (line,) = unit(path)["Service"]["ExecStart"]
    filled = line.replace("%i", "virginia").replace("%S", "/var/lib").replace("%C", "/var/cache")
    assert "%" not in filled, filled
    return shlex.split(re.sub(r"\$\{(\w+)\}", lambda name: VALUES[name[1]], filled))


def test_there_are_these_units() -> None:
    assert [path.name for path in UNITS] == ["weightgrad-global-server.service", "weightgrad-site@.service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_has_what_it_needs(path: Path) -> None:
    found = unit(path)
    assert list(found) == ["Unit", "Service", "Install"]
    service = found["Service"]
    repeated = {key for key, values in service.items() if len(values) > 1}
    assert repeated <= {"Environment"}, "a second value would replace the first in silence"
    assert service["User"] == service["Group"] == ["weightgrad"]
    assert any(value.startswith("OMP_NUM_THREADS=") for value in service["Environment"])
    hardening = ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "ProtectKernelTunables", "RestrictNamespaces")
    assert all(service[key] == ["yes"] for key in hardening)
    assert service["ProtectSystem"] == ["strict"]
    assert service["CapabilityBoundingSet"] == [""]
    assert found["Unit"]["StartLimitIntervalSec"] == ["0"], "given up on, it would stay down"
    assert found["Install"]["WantedBy"] == ["multi-user.target"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_a_command_that_exists(path: Path) -> None:
    command = unit_command(path)
    assert command[0].startswith(VENV)
    params = parsed(command)
    service = unit(path)["Service"]
    (kept,) = service["StateDirectory"]
    mine = PurePosixPath("/var/lib") / kept.replace("%i", "virginia")
    for option in ("state", "out"):
        if option in params:
            assert PurePosixPath(params[option]).is_relative_to(mine), "all else is read-only to it"


def test_the_server_is_always_started_again_and_a_finished_site_is_not() -> None:
    restart = {path.name: unit(path)["Service"]["Restart"] for path in UNITS}
    assert restart == {"weightgrad-global-server.service": ["always"], "weightgrad-site@.service": ["on-failure"]}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_environment_files_told_have_what_a_unit_asks_for(path: Path) -> None:
    text = (DEPLOY / "systemd" / "README.md").read_text()
    (file,) = unit(path)["Service"]["EnvironmentFile"]
    told = re.search(rf"tee {re.escape(file.replace('%i', 'virginia'))} <<'END'\n(.*?)^END$", text, re.M | re.S)
    assert told is not None
    assert set(re.findall(r"\$\{(\w+)\}", path.read_text())) <= set(re.findall(r"^(\w+)=", told[1], re.M))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_has_nothing_to_say_about_a_unit(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for name in ("weightgrad", "torchrun"):  # it asks whether the command can be run
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace(VENV, f"{tmp_path}/"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in (run.stdout + run.stderr).splitlines() if path.name.partition(".")[0] in line]
    if run.returncode and not said:
        pytest.skip(f"systemd-analyze does not work here: {run.stderr.strip()[:200]}")
    assert said == []


# -- Kubernetes ------------------------------------------------------------------------------

VERSIONS = {
    "Job": "batch/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "StatefulSet": "apps/v1",
}
REQUIRED = {
    "Job": {"template"},
    "NetworkPolicy": {"podSelector", "policyTypes"},
    "PersistentVolumeClaim": {"accessModes", "resources"},
    "Service": {"selector", "ports"},
    "StatefulSet": {"replicas", "selector", "serviceName", "template"},
}
Object = dict[str, Any]


class _Strict(yaml.SafeLoader):
    """Plain YAML 1.1, as Kubernetes reads it; a key that comes twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key comes twice in {node.start_mark}"
        return super().construct_mapping(node, deep)


def objects(path: Path) -> list[Object]:
    found = list(yaml.load_all(path.read_text(), _Strict))
    assert found
    return found


def of_kind(path: Path, *kinds: str) -> list[Object]:
    return [one for one in objects(path) if one["kind"] in kinds]


def workload(path: Path) -> Object:
    (one,) = of_kind(path, "StatefulSet", "Job")
    return one


def pod(path: Path) -> Object:
    found: Object = workload(path)["spec"]["template"]["spec"]
    return found


def container(path: Path) -> Object:
    (one,) = pod(path)["containers"]
    found: Object = one
    return found


def mount_of(path: Path, file: object) -> Object:
    """The mount that a path in the container lies under."""
    mounts = container(path)["volumeMounts"]
    found = [mount for mount in mounts if PurePosixPath(str(file)).is_relative_to(mount["mountPath"])]
    assert found, f"{file} is under no mount"
    longest: Object = max(found, key=lambda mount: len(mount["mountPath"]))
    return longest


manifests = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


def test_there_are_these_manifests() -> None:
    assert [path.name for path in MANIFESTS] == ["global-server.yaml", "site.yaml"]


@manifests
def test_objects_are_whole(path: Path) -> None:
    names = set()
    for one in objects(path):
        kind = one["kind"]
        assert one["apiVersion"] == VERSIONS[kind]
        assert re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", one["metadata"]["name"])
        assert one["spec"].keys() >= REQUIRED[kind], kind
        assert (kind, one["metadata"]["name"]) not in names
        names.add((kind, one["metadata"]["name"]))


@manifests
def test_selectors_find_the_pod(path: Path) -> None:
    spec = workload(path)["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    if "selector" in spec:
        assert spec["selector"]["matchLabels"].items() <= labels
    for service in of_kind(path, "Service"):
        assert service["spec"]["selector"].items() <= labels
    (policy,) = of_kind(path, "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


@manifests
def test_every_mount_has_a_volume_and_every_volume_a_mount(path: Path) -> None:
    volumes = pod(path)["volumes"]
    names = [volume["name"] for volume in volumes]
    names += [claim["metadata"]["name"] for claim in workload(path)["spec"].get("volumeClaimTemplates", [])]
    assert len(names) == len(set(names))
    mounted = [mount["name"] for mount in container(path)["volumeMounts"]]
    assert sorted(mounted) == sorted(names)
    claims = {claim["metadata"]["name"] for claim in of_kind(path, "PersistentVolumeClaim")}
    assert {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v} == claims
    for volume in volumes:
        assert len(volume) == 2, f"{volume['name']} has one source"


@manifests
def test_a_container_runs_a_command_that_exists_on_what_is_mounted(path: Path) -> None:
    params = parsed([*container(path)["command"], *container(path)["args"]])
    secrets = {volume["name"]: volume["secret"] for volume in pod(path)["volumes"] if "secret" in volume}
    assert mount_of(path, params["credentials"])["name"] in secrets
    assert "subPath" not in mount_of(path, params["credentials"]), "a new revoked.txt would never arrive"
    assert mount_of(path, params["recipe"])["readOnly"]
    for option in ("state", "out"):
        if option in params:
            kept = mount_of(path, params[option])
            assert kept["name"] == "state"
            assert not kept.get("readOnly")
    (secret,) = secrets.values()
    assert secret["defaultMode"] == 0o400, "or the key is refused"
    assert not params["insecure"]


@manifests
def test_a_pod_has_no_rights_it_does_not_need(path: Path) -> None:
    everyone, own = pod(path)["securityContext"], container(path)["securityContext"]
    assert everyone["runAsNonRoot"] is True
    assert everyone["runAsUser"] == everyone["runAsGroup"] == everyone["fsGroup"] == image_user()
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod(path)["automountServiceAccountToken"] is False
    assert "memory" in container(path)["resources"]["limits"]
    assert any(one["name"] == "OMP_NUM_THREADS" for one in container(path)["env"])


@manifests
def test_environment_values_are_texts(path: Path) -> None:
    assert all(isinstance(one["value"], str) for one in container(path)["env"])


def test_ports_of_the_server_agree() -> None:
    path = DEPLOY / "kubernetes" / "global-server.yaml"
    ports = {port["name"]: port["containerPort"] for port in container(path)["ports"]}
    params = parsed([*container(path)["command"], *container(path)["args"]])
    assert params["listen"] == f"0.0.0.0:{ports['sites']}"
    assert params["metrics"] == f"0.0.0.0:{ports['metrics']}", "a probe cannot reach 127.0.0.1"
    assert all(re.fullmatch("[a-z][a-z0-9-]{0,14}", name) for name in ports)
    for service in of_kind(path, "Service"):
        for port in service["spec"]["ports"]:
            assert port["name"] == port["targetPort"]
            assert port["port"] == ports[port["targetPort"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(path)[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    (policy,) = of_kind(path, "NetworkPolicy")
    allowed = {port["port"]: "from" in rule for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert allowed == {"sites": False, "metrics": True}, "sites from anywhere, metrics for some"


def test_the_server_is_one_and_keeps_its_state() -> None:
    path = DEPLOY / "kubernetes" / "global-server.yaml"
    spec = workload(path)["spec"]
    assert spec["replicas"] == 1
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"].keys() >= {"accessModes", "resources"}
    headless = {s["metadata"]["name"] for s in of_kind(path, "Service") if s["spec"].get("clusterIP") == "None"}
    assert spec["serviceName"] in headless


def test_a_site_ends_when_it_has_finished_and_may_call_the_server() -> None:
    path = DEPLOY / "kubernetes" / "site.yaml"
    assert workload(path)["kind"] == "Job"
    assert pod(path)["restartPolicy"] == "OnFailure"
    params = parsed([*container(path)["command"], *container(path)["args"]])
    for one in objects(path):
        assert one["metadata"]["name"] == f"weightgrad-site-{params['site']}"
    (policy,) = of_kind(path, "NetworkPolicy")
    allowed = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert allowed == {int(params["server"].rpartition(":")[2]), 53}


# -- the image -------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, in order."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def image_user() -> int:
    return int([rest for word, rest in instructions() if word == "USER"][-1])


def test_the_dockerfile_begins_with_an_image_and_knows_its_instructions() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}
    assert all(rest.startswith("python:3.11-slim") for word, rest in found if word == "FROM")
    assert image_user() > 0


def test_everything_the_dockerfile_copies_exists() -> None:
    stages = {rest.rpartition(" AS ")[2] for word, rest in instructions() if word == "FROM" and " AS " in rest}
    seen = 0
    for word, rest in instructions():
        if word != "COPY":
            continue
        words = rest.split()
        options, paths = [w for w in words if w.startswith("--")], [w for w in words if not w.startswith("--")]
        if options:
            assert [option.partition("=")[2] for option in options] == list(stages)
            continue
        for source in paths[:-1]:
            seen += 1
            assert (ROOT / source).exists(), source
    assert seen >= 5


def test_the_image_has_the_torch_of_the_constraints() -> None:
    pinned = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    for page in (DEPLOY / "Dockerfile", *PAGES):
        assert set(re.findall(r"torch==[\w.]+", page.read_text())) == {pinned[0]}, page


def test_the_image_has_one_name() -> None:
    (built,) = set(re.findall(r"--tag (\S+)", (DEPLOY / "Dockerfile").read_text()))
    assert {container(path)["image"] for path in MANIFESTS} == {built}
    assert f"--tag {built} ." in (DEPLOY / "kubernetes" / "README.md").read_text()


def test_no_registry_and_no_index_is_named() -> None:
    for path in (DEPLOY / "Dockerfile", *MANIFESTS, *UNITS):
        assert "://" not in path.read_text(), path


# -- docs/operations.md and docs/security.md --------------------------------------------------


def blocks(language: str, *pages: Path) -> list[str]:
    text = "".join(page.read_text() for page in pages or (OPERATIONS, SECURITY))
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_recipe_told_is_one() -> None:
    (text,) = [block for block in blocks("yaml") if block.startswith("data:")]
    recipe = Recipe.parse(text, "run.yaml")
    told = [parsed(command) for command in told_commands(OPERATIONS)]
    assert {params["site"] for params in told if "site" in params} <= {site.name for site in recipe.site_list}
    assert strategies.find(recipe.strategy.name, recipe.strategy.overrides)


def test_the_strategies_told_are_some() -> None:
    rows = [yaml.safe_load(block)["strategy"] for block in blocks("yaml") if block.startswith("strategy:")]
    assert len(rows) > 4
    for row in rows:
        assert strategies.find(row.pop("name"), row)


def test_the_script_told_compiles() -> None:
    (script,) = blocks("python")
    ast.parse(script)


def test_the_tutorial_s_recipe_and_script_are_whole() -> None:
    (text,) = blocks("yaml", TUTORIAL)
    names = set(SiteList.parse(text, "run.yaml").sites)
    (script,) = blocks("python", TUTORIAL)
    ast.parse(script)
    assert set(re.findall(r"train\.py .*?--site (\w+)", TUTORIAL.read_text())) == names


def said_in_the_code() -> list[str]:
    """Every text in the package, with `…` for what is filled in later."""
    found = []
    for path in (ROOT / "weightgrad").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                values = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(str(value) for value in values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.replace("%s", "…"))
    return found


def test_messages_of_the_troubleshooting_table_are_the_code_s() -> None:
    _, _, rest = OPERATIONS.read_text().partition("| message |")
    told = re.findall(r"^\| `([^`]+)` \|", rest.partition("\n\n")[0], re.MULTILINE)
    assert len(told) > 25
    said = said_in_the_code()
    # By pieces: a message may be put together from several texts.
    pieces = [piece for message in told for piece in message.split("…") if piece.strip()]
    assert [piece for piece in pieces if not any(piece in text for text in said)] == []
