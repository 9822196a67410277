"""The fault schedule of a simulation: links are cut, slowed or flap; sites and the server die and return."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from weightgrad.lab.sim.plan import Fault

if TYPE_CHECKING:
    from weightgrad.lab.sim.simulator import Simulator


def schedule_faults(simulator: Simulator) -> None:
    """Put every fault of the plan on the simulator's clock."""
    for fault in simulator.plan.faults:
        simulator.clock.at(fault.at, partial(_begin, simulator, fault))


def _record(simulator: Simulator, what: str, where: tuple[str, ...]) -> None:
    simulator.events.write("fault", simulator.clock.now, what=what, where=list(where))


def _begin(simulator: Simulator, fault: Fault) -> None:
    if fault.what in ("cut", "slow"):
        _scale_link(simulator, fault, 0.0 if fault.what == "cut" else fault.factor)
        if fault.seconds is not None:
            simulator.clock.after(fault.seconds, partial(_scale_link, simulator, fault, 1.0))
    elif fault.what == "flap":
        _flap(simulator, fault, fault.at + (fault.seconds or 0.0), cut=True)
    elif fault.what == "kill" and simulator.plan.server in fault.where:
        _kill_server(simulator, fault)
    elif fault.what == "kill":
        _kill_site(simulator, fault)
    elif fault.what == "join":
        _start_site(simulator, fault, "join")
    elif fault.what == "leave":
        _record(simulator, "leave", fault.where)
        for name in fault.where:
            simulator.by_name[name].leaving = True
            simulator.continue_site(simulator.by_name[name])


def _scale_link(simulator: Simulator, fault: Fault, factor: float) -> None:
    _record(simulator, "heal" if factor == 1.0 else fault.what if fault.what != "flap" else "cut", fault.where)
    simulator.network.scale_link(fault.where, factor, fault)


def _flap(simulator: Simulator, fault: Fault, until: float, *, cut: bool) -> None:
    over = simulator.clock.now >= until
    _scale_link(simulator, fault, 0.0 if cut and not over else 1.0)
    if not over:
        simulator.clock.after(fault.period / 2, partial(_flap, simulator, fault, until, cut=not cut))


def _kill_site(simulator: Simulator, fault: Fault) -> None:
    _record(simulator, "kill", fault.where)
    for name in fault.where:
        site = simulator.by_name[name]
        site.alive = False
        site.life += 1
        if site.waiting_since is not None:
            site.times.waiting += simulator.clock.now - site.waiting_since
            site.waiting_since = None
    simulator.network.drop(*fault.where)
    if fault.seconds is not None:
        simulator.clock.after(fault.seconds, partial(_start_site, simulator, fault, "return"))


def _start_site(simulator: Simulator, fault: Fault, what: str) -> None:
    _record(simulator, what, fault.where)
    for name in fault.where:
        simulator.start_site(simulator.by_name[name])


def _kill_server(simulator: Simulator, fault: Fault) -> None:
    _record(simulator, "kill", fault.where)
    simulator.server_alive = False
    simulator.network.drop(*simulator.by_name)
    if fault.seconds is not None:
        simulator.clock.after(fault.seconds, partial(_restart_server, simulator, fault))


def _restart_server(simulator: Simulator, fault: Fault) -> None:
    if simulator.server_alive:
        return  # it was killed twice and is already back
    _record(simulator, "return", fault.where)
    simulator.server_alive = True
    simulator.restore_server()
