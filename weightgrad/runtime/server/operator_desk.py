"""Answers the questions that come to the global server from outside any session, and does what its operator asks for.

Who asks is known by the certificate. A site, or somebody who will be one, may ask what the server is ("about"). All
other questions are for operators, whose certificates `weightgrad certs add-operator` makes: their common name begins
with words that no site can have. What changes something is done by the thread of the server, between two messages, and
is in the log and on the disk before the operator has the answer.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightgrad.core.server.operation import Action, Operation
from weightgrad.errors import CredentialsError, LinkError, ProtocolError, RefusedError, WeightGradError
from weightgrad.runtime.process_facts import about_this_process
from weightgrad.runtime.security.certificates import is_operator
from weightgrad.runtime.server.orders import Admit, to_bytes
from weightgrad.runtime.server.site_table import site_rows
from weightgrad.runtime.transport.grpc_questions import Caller

if TYPE_CHECKING:
    from weightgrad.runtime.server.global_server import GlobalServer

log = logging.getLogger("weightgrad.serve")

_ANSWER_S = 60.0  # for the server's thread, which may be closing a round
_MOST_WAITING = 16  # questions, of all operators together
_REMOVED = "the operator has removed this site from the run"
_REVOKED = "the certificate of this site is revoked"


class Question(bytes):
    """An operator's request on its way through the inbox of the server, and the answer once there is one."""

    who: str
    asked: dict[str, Any]
    answer: dict[str, Any] | WeightGradError
    answered: threading.Event


class OperatorDesk:
    """The questions of one global server.

    Args:
        server: the server.
        put: gives a question to the server's thread.
    """

    def __init__(self, server: GlobalServer, put: Callable[[Question], None]) -> None:
        self._server, self._put = server, put
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "sites": lambda asked: {},
            "add": self._add,
            "remove": self._remove,
            "revoke": self._revoke,
            "set-aside": self._change_standing,
            "take-back": self._change_standing,
            "pause": self._pause_or_resume,
            "resume": self._pause_or_resume,
        }

    # -- from the transport's threads -----------------------------------------------------------

    def check_caller(self, caller: Caller) -> None:
        """See `Responder.check_caller`: sites of the run, operators, and without TLS everybody on this machine."""
        admission = self._server.admission
        if caller.serial is not None and admission.peers.is_revoked(caller.serial):
            raise CredentialsError(f"the certificate of {caller.name} (serial {caller.serial:x}) is revoked")
        if not admission.peers.secure or is_operator(caller.name):
            return
        if caller.name not in admission.roster.sites:
            raise RefusedError(
                f"no site {caller.name!r} in this run; it has {', '.join(admission.roster.sites)}; its operator can "
                "add one with `weightgrad sites add`"
            )

    def answer(self, caller: Caller, request: bytes) -> bytes:
        """See `Responder.answer`."""
        asked = _parse(request)
        if asked["ask"] == "about":
            return json.dumps(self._about(caller)).encode()
        if self._server.admission.peers.secure and not is_operator(caller.name):
            self._server.telemetry.refused_connection("not an operator")
            raise CredentialsError(
                f"{asked['ask']!r} is for operators, and the certificate is of {caller.name!r}; make one with "
                "`weightgrad certs add-operator DIR NAME` and use its directory"
            )
        if asked["ask"] not in self._actions:
            known = ", ".join(["about", *self._actions])
            raise ProtocolError(f"a question {asked['ask']!r}; this server answers {known}; run one release everywhere")
        question = Question(b"")
        question.who, question.asked, question.answered = caller.name or "somebody here", asked, threading.Event()
        if not self._waiting.acquire(blocking=False):
            raise LinkError("too many questions wait; try again in a few seconds")
        try:
            self._put(question)
            if not question.answered.wait(_ANSWER_S):
                raise LinkError(
                    f"the server has not answered within {_ANSWER_S:g} s; look with `weightgrad sites list`"
                )
        finally:
            self._waiting.release()
        if isinstance(question.answer, WeightGradError):
            raise question.answer
        return json.dumps(question.answer).encode()

    def _about(self, caller: Caller) -> dict[str, Any]:
        admission, core = self._server.admission, self._server.coordinator
        return {
            **about_this_process(),
            "you": caller.name,
            "address": caller.address,
            "bit_s": None if caller.name is None else admission.roster.bit_s(caller.name),
            "sites": list(admission.roster.sites),
            "parameters": None if admission.layout is None else admission.layout.numel,
            "step": None if core is None else core.step,
        }

    # -- in the server's thread -----------------------------------------------------------------

    def handle(self, question: Question) -> None:
        """Do what is asked for, and answer."""
        try:
            found = self._actions[question.asked["ask"]](question.asked)
            if question.asked["ask"] != "sites":
                self._server.telemetry.operated(question.who, question.asked["ask"], question.asked.get("site", ""))
            question.answer = {**found, **self._state()}
        except WeightGradError as error:
            question.answer = error
            if not isinstance(error, RefusedError | ProtocolError):
                raise
        finally:
            if not hasattr(question, "answer"):
                question.answer = LinkError("the server failed; see its log")
            question.answered.set()

    def reconcile(self) -> None:
        """After a restart: the server may have ended after a site was removed, and before its rounds knew."""
        core = self._server.coordinator
        removed = self._server.admission.roster.facts.removed
        for name in [] if core is None else sorted(removed & core.members.by_name.keys()):
            if core is not None and not core.members.by_name[name].done:
                self._operate(Action.REMOVE, name)

    def introduce(self, process: int) -> None:
        """Tell another process of the server who may take part."""
        self._server.group.send(process, to_bytes(Admit(roster=self._server.admission.roster.facts.dump())))

    def _state(self) -> dict[str, Any]:
        core, roster = self._server.coordinator, self._server.admission.roster
        return {
            "sites": site_rows(roster, core, self._server.transport, self._server.telemetry.away),
            "paused": core is not None and core.pause.on,
            "version": None if core is None else core.version,
            "step": None if core is None else core.step,
            "durable": roster.durable,
        }

    def _add(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._server.admission.roster.add(_site(asked), _bandwidth(asked))
        self._tell_processes()
        return {}

    def _remove(self, asked: dict[str, Any]) -> dict[str, Any]:
        site = _site(asked)
        self._server.admission.roster.remove(site)
        self._let_go(site, _REMOVED)
        return {}

    def _revoke(self, asked: dict[str, Any]) -> dict[str, Any]:
        site, roster = _site(asked), self._server.admission.roster
        known = roster.facts.serials.get(site, ())
        given = asked.get("serial")
        serials = known[-1:] if given is None else (_serial(given),)
        if given is None and site not in roster.names:
            roster.check_known(site)
        roster.revoke(site, serials)
        if set(serials) & set(known[-1:]):  # it is the certificate that the site has, and not one of before
            self._let_go(site, f"{_REVOKED} (serial {serials[0]:x}); ask the operator for a new one")
        else:
            self._tell_processes()
        return {"serials": [f"{one:x}" for one in serials]}

    def _change_standing(self, asked: dict[str, Any]) -> dict[str, Any]:
        site = _site(asked)
        self._server.admission.roster.check_known(site)
        self._operate(Action(asked["ask"]), site)
        return {}

    def _pause_or_resume(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._operate(Action(asked["ask"]))
        return {}

    def _let_go(self, site: str, why: str) -> None:
        """End what a site has here, and let nobody wait for it."""
        core = self._server.coordinator
        if core is not None and site in core.members.by_name:
            self._operate(Action.REMOVE, site)
        self._server.admission.lost(site)
        self._tell_processes(drop=site, why=why)
        for peer in [peer for peer in self._server.transport.sessions() if peer.site == site]:
            self._server.transport.drop(peer, why)

    def _operate(self, action: Action, site: str = "") -> None:
        if self._server.rounds is None:
            raise RefusedError("no site has brought a model yet: there is nothing to do that to; wait until one trains")
        self._server.rounds.operate(Operation(action, site), self._server.now)

    def _tell_processes(self, drop: str = "", why: str = "") -> None:
        order = Admit(roster=self._server.admission.roster.facts.dump(), drop=drop, why=why)
        for process in range(1, self._server.group.size):
            self._server.group.send(process, to_bytes(order))


def _parse(request: bytes) -> dict[str, Any]:
    try:
        found = json.loads(request)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a question that is not JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("ask"), str):
        raise ProtocolError("a question that does not say what it asks; run the same release everywhere")
    return found


def _site(asked: dict[str, Any]) -> str:
    site = asked.get("site")
    if not isinstance(site, str) or not site:
        raise ProtocolError(f"the site is {site!r}; wanted the name of one")
    return site


def _bandwidth(asked: dict[str, Any]) -> float | None:
    found = asked.get("bit_s")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e15:
        raise ProtocolError(f"the bandwidth is {found!r}; wanted bit/s")
    return float(found)


def _serial(text: object) -> int:
    try:
        return int(str(text).replace(":", ""), 16)
    except ValueError:
        raise ProtocolError(
            f"the serial number is {text!r}; wanted one in hex, as `weightgrad certs show` prints it"
        ) from None
