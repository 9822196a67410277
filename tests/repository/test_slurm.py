"""The Slurm scripts of `deploy/slurm`: with stand-ins for Slurm's commands that run real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.runtime.deployment import PATIENCE_S
from weightgrad.runtime.security import certificates

from . import fake_slurm

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
RUN_FORKED = """#!{python}
# What `{words}` runs, in a process that has torch already.
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.fork_server import Child
child = Child({address!r}, [sys.executable, *{words!r}, *sys.argv[1:]], env=os.environ, stdout=sys.stdout,
              stderr=sys.stderr, start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
sys.exit(abs(child.wait()))
"""


class Cluster:
    """A directory with Slurm's commands on the PATH, and the jobs in it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        programs = place / "bin"
        programs.mkdir()
        text = Path(fake_slurm.__file__).read_text()
        for name in ("sbatch", "srun", "scontrol"):
            self.program(name, f"#!{sys.executable}\n{text}")
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
        self.environment["FAKE_REQUEUED"] = str(place / "requeued")

    def program(self, name: str, text: str) -> None:
        path = self.place / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def submit(self, name: str, *words: str) -> None:
        job = str(4321 + len(self.jobs))
        environment = {**self.environment, "FAKE_JOB_ID": job}
        self.jobs[name] = subprocess.Popen(
            ["sbatch", f"--output={name}.log", *words], cwd=self.place, env=environment, start_new_session=True
        )

    def log(self, name: str) -> str:
        path = self.place / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, happened: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < limit, {name: self.log(name) for name in self.jobs}
            for name, job in self.jobs.items():
                assert job.poll() in (None, 0), f"{name}: {self.log(name)}"
            time.sleep(0.02)

    def end(self) -> None:
        for job in self.jobs.values():
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_with_options_of_sbatch(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    options = re.findall(r"^#SBATCH (.*)$", path.read_text(), re.MULTILINE)
    found = fake_slurm.parser().parse_args([*options, path.name])
    assert found.requeue
    assert found.signal == "B:USR1@120", "the script itself must get it"
    assert found.open_mode == "append", "a job that goes on would empty its log"
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", str(path)], check=True)


def test_a_server_and_two_sites_of_one_and_two_nodes(cluster: Cluster) -> None:
    (address,) = fork_server.popen().args  # type: ignore[attr-defined]
    for name, words in (("weightgrad", ["-m", "weightgrad"]), ("torchrun", ["-m", "torch.distributed.run"])):
        text = RUN_FORKED.format(python=sys.executable, words=words, root=str(ROOT), address=address)
        cluster.program(name, text)
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    assert script.count("site.steps < 300") == 1
    (cluster.place / "train.py").write_text(script.replace("site.steps < 300", "site.steps < 40"))
    certificates.create(cluster.place / "certs", ["localhost"], ["virginia", "tokyo"])
    cluster.submit(
        "server", str(SLURM / "global-server.sbatch"), "--sites", "virginia,tokyo", "--credentials", "certs/server",
        "--state", "state/server", "--out", "out", "--until-finished", "--listen", "127.0.0.1:0", "--metrics",
        "127.0.0.1:0",
    )  # fmt: skip
    cluster.until(lambda: "listening on port" in cluster.log("server"))
    (port,) = re.findall(r"listening on port (\d+)", cluster.log("server"))
    for name, nodes in (("virginia", 2), ("tokyo", 1)):
        cluster.submit(
            name, f"--nodes={nodes}", "--cpus-per-task=1", str(SLURM / "site.sbatch"), "train.py", "--site", name,
            "--server", f"127.0.0.1:{port}", "--credentials", f"certs/sites/{name}",
        )  # fmt: skip
    cluster.until(lambda: all(job.poll() is not None for job in cluster.jobs.values()))
    assert (cluster.place / "out" / "model.safetensors").is_file()
    for name in ("virginia", "tokyo"):
        assert f"{name} leaves" in cluster.log("server")
        assert (cluster.place / "state" / name).is_dir()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_job_whose_time_is_nearly_up_goes_back_into_the_queue(cluster: Cluster, path: Path) -> None:
    waits = "#!/bin/bash\ntrap 'echo ended in order; exit 0' TERM\necho running\nwhile :; do sleep 0.05; done\n"
    cluster.program("srun", waits)
    cluster.submit("job", str(path), "train.py")
    cluster.until(lambda: "running" in cluster.log("job"))
    cluster.jobs["job"].send_signal(signal.SIGUSR1)
    cluster.until(lambda: cluster.jobs["job"].poll() is not None)
    assert (cluster.place / "requeued").read_text() == "4321"
    assert "ended in order" in cluster.log("job")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("code", [0, 3])
def test_a_job_ends_as_its_step_does(cluster: Cluster, path: Path, code: int) -> None:
    cluster.program("srun", f"#!/bin/bash\nexit {code}\n")
    cluster.submit("job", str(path), "train.py")
    assert cluster.jobs["job"].wait(PATIENCE_S) == code
    assert not (cluster.place / "requeued").exists()


def test_a_node_has_as_many_ranks_as_gpus(cluster: Cluster) -> None:
    cluster.program("srun", '#!/bin/bash\necho "$OMP_NUM_THREADS threads: $*"\n')
    cluster.submit("job", "--nodes=2", "--gpus-per-node=4", str(SLURM / "site.sbatch"), "train.py", "--site", "a")
    assert cluster.jobs["job"].wait(PATIENCE_S) == 0
    said = cluster.log("job")
    assert "2 threads: --kill-on-bad-exit=1" in said, "eight cores for four ranks"
    assert "--nnodes 2 --nproc-per-node 4 " in said
    assert "--rdzv-endpoint localhost:24321 train.py --site a" in said


def test_a_site_whose_step_fails_is_not_put_back(cluster: Cluster) -> None:
    cluster.program("torchrun", "#!/bin/bash\nexit 7\n")
    cluster.submit("job", "--nodes=1", str(SLURM / "site.sbatch"), "train.py")
    assert cluster.jobs["job"].wait(PATIENCE_S) == 7
