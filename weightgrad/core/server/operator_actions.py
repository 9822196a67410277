"""What the global server does when the operator of the run asks for it."""

from __future__ import annotations

from weightgrad.core.server.membership import Members
from weightgrad.core.server.open_rounds import OpenRounds
from weightgrad.core.server.operation import Action, Operation, Pause
from weightgrad.core.server.outbox import Outbox
from weightgrad.wire import messages


class OperatorActions:
    """Carries out the operator's operations.

    Args:
        members: the sites.
        pause: whether the run is paused.
        rounds: the open rounds, whose deadlines stand still during a pause.
    """

    def __init__(self, members: Members, pause: Pause, rounds: OpenRounds) -> None:
        self._members = members
        self._pause = pause
        self._rounds = rounds

    def carry_out(self, operation: Operation, now: float, out: Outbox) -> None:
        """Do what the operator asks for.

        Args:
            operation: what.
            now: the time.
            out: gets the messages to send.

        Raises:
            ProtocolError: it concerns a site that has never joined.
        """
        members, pause = self._members, self._pause
        action, site = operation.action, operation.site
        if action is Action.PAUSE:
            if pause.begin(now):
                out.messages += [(name, messages.Pause(paused=True)) for name in members.listening]
        elif action is Action.RESUME:
            if pause.on:
                out.messages += [(name, messages.Pause(paused=False)) for name in members.listening]
            self._rounds.postpone(pause.end(now))
        else:
            members.check_known(site)
            change = {Action.REMOVE: members.leave, Action.SET_ASIDE: members.set_aside}
            change.get(action, members.take_back)(site)
