"""DataLoaders with workers after `join`: a process that has joined can be forked, and its workers live."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from . import loader_site
from .deployment import PATIENCE_S, Hub, tiny
from .loader_site import BATCH, CASES, HUGGING_FACE_EPOCHS, ITEMS

SITES = ("east", "west")


def test_two_sites_train_through_workers_of_every_kind() -> None:
    """With `fork`, which is the default on Linux, workers once aborted in gRPC's fork handlers."""
    script = str(Path(loader_site.__file__))
    with Hub(tiny("baseline")) as hub:
        sites = [
            subprocess.Popen(
                [sys.executable, script, hub.address, name],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in SITES
        ]
        try:
            printed = [site.communicate(timeout=PATIENCE_S) for site in sites]
        finally:
            for site in sites:
                site.kill()
                site.wait()
    assert [site.returncode for site in sites] == [0, 0], printed
    epochs = sum(epochs for _, _, _, epochs in CASES)
    if importlib.util.find_spec("transformers") is not None:
        epochs += HUGGING_FACE_EPOCHS
    found = [[line for line in said.splitlines() if line.startswith(("steps ", "gRPC "))] for said, _ in printed]
    assert found[0] == found[1]
    assert found[0][0].startswith(f"steps {epochs * ITEMS // BATCH} model ")
    assert found[0][1] == "gRPC is not loaded"
