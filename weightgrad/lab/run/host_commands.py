"""Commands on the hosts of an emulated network, other than training: a shell, or a command in every site."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence

from weightgrad.lab.emulate.network import Network
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.emulation import PORT


def host_environment(wan: Network) -> dict[str, str]:
    """Environment variables with every host's address, as WG_HOST_NAME."""
    return {
        f"WG_HOST_{''.join(c if c.isalnum() else '_' for c in name).upper()}": wan.host(name).address
        for name in wan.hosts
    }


def shell(wan: Network, host: str, say: Callable[[str], None]) -> int:
    """Run an interactive shell on a host; returns its exit code."""
    place = wan.host(host)
    say(f"a shell on {host}, {place.address}; other hosts resolve by name; leaving the shell ends the network")
    process = place.popen(
        [os.environ.get("SHELL", "/bin/sh")], env={**os.environ, **host_environment(wan), "WG_HOST": host}
    )
    while True:
        try:
            return int(process.wait())
        except KeyboardInterrupt:
            continue  # Ctrl-C is for what runs in the shell


def run_in_every_site(wan: Network, recipe: Recipe, command: Sequence[str], say: Callable[[str], None]) -> int:
    """Run a command in every site at the same time; each line of output begins with the site's name.

    Args:
        wan: The emulated network.
        recipe: Its sites are the hosts.
        command: The command and its arguments.
        say: Called with each line of output.

    Returns:
        The largest exit code.
    """
    codes: dict[str, int] = {}

    def run_in(site: str) -> None:
        environment = {**os.environ, **host_environment(wan), "WG_SITE": site, "WG_HOST": site}
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

    threads = [threading.Thread(target=run_in, args=(site.name,)) for site in recipe.site_list]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(codes.values(), default=0)
