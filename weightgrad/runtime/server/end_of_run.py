"""When a server with `--until-finished` may end, and what it writes then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from weightgrad.core.server.coordinator import ServerCoordinator
from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints.final_state import FinalStates
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.final_model import write_final_model
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.orders import Finish, to_bytes
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.server.serve_options import ServeOptions
from weightgrad.runtime.transport.transport import ServerTransport
from weightgrad.wire.messages import FinalPart

log = logging.getLogger("weightgrad.serve")

_GOODBYE_S = 60.0  # to wait for sites that have finished and have not left
_END_S = 3600.0  # after which a run that is over ends, whatever a site still sends or does not read
_DISCONNECT_S = 5.0  # to wait for sites that have left and are still connected


class EndOfRun:
    """The end of a run.

    Args:
        run_config: what is trained.
        options: whether and what to write, and whether to end at all.
        transport: the connections to the sites.
        coordinator: returns the coordinator; None before there is a global model.
        roster: the sites that may take part: those that were removed have not finished, and are not waited for.
    """

    def __init__(
        self,
        run_config: RunConfig,
        options: ServeOptions,
        transport: ServerTransport,
        coordinator: Callable[[], ServerCoordinator | None],
        roster: Roster,
    ) -> None:
        self._roster = roster
        self._run_config, self._options, self._transport = run_config, options, transport
        self._coordinator = coordinator
        self._final_states = FinalStates(options.out, run_config.sites)
        self.gone: set[str] = set()
        """The sites that went without a word, and had not finished."""
        self.finished_since: float | None = None
        self._said_away = False
        self._first_finished = 0.0
        self._mark: tuple[tuple[str, int, bool], ...] = ()
        self._marked = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether every site has finished, or is lost, and at least one has finished."""
        core = self._coordinator()
        if core is None:
            return False
        members = [one for one in core.members.by_name.values() if not self._roster.is_out(one.name)]
        finished = [member for member in members if member.done and member.name not in self.gone]
        return all(member.done or not member.live for member in members) and bool(finished)

    def should_continue(self) -> bool:
        """Whether the run is not over, or sites may still come back for its last results.

        A site that crashed after its last push, or after this server crashed before it could send the last result,
        must still find a server.
        """
        core = self._coordinator()
        if core is None or not self._options.until_finished:
            return True
        if not self.finished:
            self.finished_since = None
            return not self._is_given_up(core)
        self._first_finished = self._first_finished or time.monotonic()
        if time.monotonic() > self._first_finished + _END_S:
            log.warning("the run has been over for %g s, and a site still keeps its connection busy: ending", _END_S)
            return False
        sending = any(one.streams and one.unacknowledged_bytes for one in self._transport.sessions().values())
        if self.finished_since is None or sending:  # sending a whole global model may take minutes
            self.finished_since = time.monotonic()
        someone_stays = any(member.live for member in core.members.by_name.values())
        timeout = _GOODBYE_S if someone_stays else _DISCONNECT_S
        waits = someone_stays or bool(self._transport.sessions())
        if away := self._away(core):
            self._say_away(away)
            timeout, waits = max(timeout, self._options.return_s), True
        return waits and time.monotonic() < self.finished_since + timeout

    def _is_given_up(self, core: ServerCoordinator) -> bool:
        """Whether some have finished, and of the others nothing comes any more: no round is open that would lose them.

        One that is connected may be slow and has an hour, one that is not `return_s`, beside what a round would wait.
        """
        members = core.members.by_name.values()
        left = {one.name for one in members if not one.done}
        mark = tuple((one.name, one.pushed_round, one.done) for one in members)
        timeout, now = core.timeout(), time.monotonic()
        if mark != self._mark or len(left) == len(members) or timeout is None:
            self._mark, self._marked = mark, now
            return False
        connected = {peer.site for peer, one in self._transport.sessions().items() if one.streams}
        waits = timeout + (_END_S if left & connected else self._options.return_s)
        if now < self._marked + waits:
            return False
        log.warning("others have finished, and %s has pushed nothing for %g s", ", ".join(sorted(left)), waits)
        return True

    def _away(self, core: ServerCoordinator) -> list[str]:
        """The sites that are lost and had not finished; one that never came is not waited for."""
        members = core.members.by_name.values()
        unfinished = [one.name for one in members if (not one.live and not one.done) or one.name in self.gone]
        return [
            name for name in unfinished if not self._roster.is_out(name) and core.members.by_name[name].pushed_round
        ]

    def _say_away(self, away: list[str]) -> None:
        if not self._said_away:
            self._said_away = True
            log.warning(
                "all others have finished; waiting %g s for the return of %s, which had not",
                self._options.return_s,
                ", ".join(away),
            )

    def dismiss(self) -> None:
        """The run is over: tell the sites that had not finished, or they would wait for a server that is not there."""
        core = self._coordinator()
        if core is None or not self._options.until_finished:
            return
        without = [one.name for one in core.members.by_name.values() if not one.done or one.name in self.gone]
        if without:
            log.warning("the run ends without %s", ", ".join(without))
        for peer in [peer for peer in self._transport.sessions() if peer.site in without]:
            self._transport.drop(
                peer,
                f"the run has finished without {peer.site}, at version {core.version} of the global model, and the "
                f"global server has ended; {peer.site} keeps what it has on its disk",
            )

    def take(self, part: FinalPart, numel: int) -> None:
        """A site sends its final state, which needs time."""
        self._final_states.sites = self._roster.names
        self._final_states.take(part, numel)
        self.finished_since = None

    def write(self, process: ServerProcess, group: ServerGroup, failed: BaseException | None) -> None:
        """Let all processes end, and write the final global model.

        Args:
            process: this process, which is process 0.
            group: all processes.
            failed: why the run has failed, if it has.
        """
        core = self._coordinator()
        writes = core is not None and self._options.out is not None
        if group.size > 1 and failed is not None:
            writes = False  # a tensor may be in several processes, and some have ended
        for other in range(1, group.size) if failed is None else ():
            group.send(other, to_bytes(Finish(write_model=writes)))
        if writes and self._options.out is not None and process.serving is not None:
            try:
                shard = process.serving.shard
                quantized = self._run_config.fit(shard.layout.numel).evaluate == "quantized"
                shared, version = None if core is None else core.buffers.mean, shard.global_model.version
                elsewhere = shard.global_model.elsewhere
                self._final_states.sites = self._roster.names
                state = self._final_states.collect(
                    shard.layout, version, wanted=quantized, elsewhere=elsewhere, shared=shared
                )
                write_final_model(self._options.out, shard, group, state)
            except CheckpointError as error:
                if failed is None:
                    raise
                log.error("%s", error)  # the first failure is the one that is raised
        if failed is None:
            group.close()
