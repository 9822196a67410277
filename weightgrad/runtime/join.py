"""`join`: the first of the five lines of a training script."""

from __future__ import annotations

from pathlib import Path

from weightgrad.errors import StrategyError
from weightgrad.runtime.join_options import JoinOptions, check_download_codec, find_credentials
from weightgrad.runtime.session import Site
from weightgrad.runtime.site import present_sites


def join(
    address: str,
    *,
    site: str,
    credentials: str | Path | None = None,
    insecure: bool = False,
    state: str | Path | None = None,
    checkpoint_every: int = 50,
    streams: int = 4,
    timeout: float = 60.0,
    reconnect: float = 3600.0,
    download_codec: str | None = None,
    metrics: str | None = None,
) -> Site:
    """Make this process a rank of a site; called on every rank. Nothing is sent before `Site.prepare`.

        with wg.join("gs.example.net:7443", site="virginia", credentials="certs/") as site:
            model, optimizer = site.prepare(model, optimizer)
            ...

    Args:
        address: HOST:PORT of the global server.
        site: The name of the site, one of those the server expects.
        credentials: The site's directory of certificates, or the directory in which all certificates were made.
        insecure: Use neither certificates nor encryption. Only for a server on this machine.
        state: The directory of the site's checkpoints, from which it goes on after a crash. Without it a site that is
            started again begins from the global model.
        checkpoint_every: Steps from one checkpoint to the next.
        streams: Connections that carry messages to the server in parallel, 1 to 64; one more carries control messages.
        timeout: Seconds to wait for a server that cannot be reached yet.
        reconnect: Seconds for which a site in training waits for a server that has gone away; then it ends, and can be
            started again from its checkpoint. If the server's machine answers that nothing listens there, the server
            has ended, and five minutes are enough.
        download_codec: A codec without memory, such as "qsgd(bits=8)", for a site that joins late over a slow link.
            It gets its first model in that codec and begins to train after a fraction of the download; the exact
            global model follows while it trains and replaces the first, and no step is lost. It has no effect where
            no model must be sent.
        metrics: HOST:PORT on which rank 0 serves this site's /metrics and /healthz while it trains; None serves
            nothing.

    Returns:
        The site, which can be used as a context manager.

    Raises:
        StrategyError: There are neither credentials nor `insecure`, or `insecure` is for another machine; or this site
            trains in this process already.
        LinkError: `address` is not HOST:PORT.
        CredentialsError: The credentials cannot be read, have expired, or are not this site's.
        SpecError: `download_codec` is no codec, or one with a memory.
    """
    check_download_codec(download_codec)
    if present_sites.find(address, site) is not None:
        raise StrategyError(
            f"{site} trains in this process already: join() was called before and leave() was not, as when a "
            "notebook's cell is run again. Call leave() on the site that the first join() has returned, and then join"
        )
    options = JoinOptions(
        address=address,
        site=site,
        credentials=find_credentials(address, site, credentials, insecure),
        state=Path(state) if state is not None else None,
        checkpoint_every=checkpoint_every,
        streams=streams,
        timeout=timeout,
        reconnect=reconnect,
        download_codec=download_codec,
        metrics=metrics,
    )
    return Site(options)
