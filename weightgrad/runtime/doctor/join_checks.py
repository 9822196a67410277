"""The cheap checks of `weightgrad doctor`, made when a site joins, as one line in its log."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightgrad.runtime.doctor.server_checks import check_clock, check_versions
from weightgrad.runtime.doctor.site_checks import (
    Finding,
    Level,
    available_memory,
    check_backend,
    check_certificate,
    check_kernels,
    check_proxy,
)
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.units import show_bytes

log = logging.getLogger("weightgrad")

_LITTLE_ROOM = 12.0  # bytes a parameter: two checkpoints of a global model and a residual, and a little


def join_findings(
    credentials: Credentials | None,
    server: Mapping[str, Any] | None,
    asked_at: float,
    state: Path | None,
    parameters: int,
) -> Iterator[Finding]:
    """What can be told without asking anybody else and without waiting.

    Args:
        credentials: the site's certificates; None without TLS.
        server: what the server has said about itself; None if it is of a release that says nothing.
        asked_at: when it was asked.
        state: the directory of the site's checkpoints.
        parameters: of the model.
    """
    if credentials is not None:
        yield check_certificate(credentials)
        yield check_proxy(os.environ)
    if server:
        yield check_versions(server)
        yield check_clock(float(server["time"]), asked_at, time.time())
    if state is not None:
        yield check_room(state, _LITTLE_ROOM * parameters)
    yield check_memory_left(available_memory())
    yield check_kernels()
    yield check_backend()


def check_room(state: Path, needed_bytes: float, free: float | None = None) -> Finding:
    """Whether the state directory has room for two checkpoints."""
    try:
        room = float(shutil.disk_usage(state).free) if free is None else free
    except OSError as error:
        return Finding("disk", Level.WARNING, f"{state} cannot be looked at: {error.strerror or error}")
    if room < needed_bytes:
        told = f"{show_bytes(room)} free in {state}, and checkpoints need about {show_bytes(needed_bytes)}: free some"
        return Finding("disk", Level.WARNING, told)
    return Finding("disk", Level.OK, f"{show_bytes(room)} free")


def check_memory_left(found: float | None) -> Finding:
    """Whether this machine has some memory left."""
    if found is None:
        return Finding("memory", Level.OK, "not known")
    if found < 256e6:
        return Finding("memory", Level.WARNING, f"{show_bytes(found)} available: use fewer ranks here")
    return Finding("memory", Level.OK, f"{show_bytes(found)} available")


def say(site: str, findings: Iterator[Finding]) -> None:
    """One line: what is wrong, or that nothing is."""
    found = list(findings)
    wrong = [one for one in found if one.level is not Level.OK]
    if wrong:
        told = "; ".join(f"{one.check}: {one.text}" for one in wrong)
        log.warning("%s: %d checks, %d with a word to say: %s", site, len(found), len(wrong), told)
    else:
        log.info("%s: %d checks are ok: %s", site, len(found), ", ".join(one.check for one in found))
