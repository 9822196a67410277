"""A page for as long as a run lasts: what `--page` of a command does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from weightgrad.lab.page import page_server
from weightgrad.lab.page.process_sampler import ProcessSampler


@contextlib.contextmanager
def watched_run(
    listen: str | None,
    directory: Path,
    say: Callable[[str], None],
    *,
    name: str = "this command",
    certificates: Path | None = None,
) -> Iterator[None]:
    """Serve the page of a run while it runs.

    Args:
        listen: HOST:PORT, or None for no page.
        directory: of the run.
        say: told where the page is.
        name: of this process, on the page.
        certificates: the directory of `weightgrad certs`; None: `certs` of the run.
    """
    if listen is None:
        yield
        return
    served = page_server.serve(listen, directory, certificates=certificates)
    sampler = ProcessSampler(directory, name)
    say(f"The page is at {served.url}")
    try:
        yield
    finally:
        sampler.stop()
        served.stop()
