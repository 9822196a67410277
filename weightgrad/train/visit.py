"""Other things to do in an emulated world than training: look around on a host, or run a command in every site."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence

from weightgrad.emulate.network import Network
from weightgrad.train.emulated import PORT
from weightgrad.train.recipe import Recipe


def surroundings(wan: Network) -> dict[str, str]:
    """The environment of a visitor: every host's address, as WG_HOST_NAME."""
    return {
        f"WG_HOST_{''.join(c if c.isalnum() else '_' for c in name).upper()}": wan.host(name).address
        for name in wan.hosts
    }


def shell(wan: Network, host: str, say: Callable[[str], None]) -> int:
    """A shell on that host, until it is left."""
    place = wan.host(host)
    say(f"a shell on {host}, {place.address}; hosts are known by name; exit ends the whole network")
    process = place.popen(
        [os.environ.get("SHELL", "/bin/sh")], env={**os.environ, **surroundings(wan), "WG_HOST": host}
    )
    while True:
        try:
            return int(process.wait())
        except KeyboardInterrupt:
            continue  # Ctrl-C is for what runs in the shell


def everywhere(wan: Network, recipe: Recipe, command: Sequence[str], say: Callable[[str], None]) -> int:
    """The command in every site at once, its lines with the site's name before them; the worst exit code."""
    codes: dict[str, int] = {}

    def one(site: str) -> None:
        environment = {**os.environ, **surroundings(wan), "WG_SITE": site, "WG_HOST": site}
        server = recipe.server.name
        if any({site, server} == set(link.between) for link in wan.links):
            environment["WG_SERVER"] = wan.reach(site, server, PORT)
        try:
            process = wan.host(site).popen(
                list(command), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except OSError as error:
            say(f"{site}: {error}")
            codes[site] = 127
            return
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                say(f"{site}: {line.rstrip()}")
        codes[site] = int(process.returncode)

    threads = [threading.Thread(target=one, args=(site.name,)) for site in recipe.site_list]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(codes.values(), default=0)
