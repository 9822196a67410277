"""Faults on schedule: links are cut, slowed or flap; sites and the server die and return; sites join and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightgrad.sim.plan import Fault

if TYPE_CHECKING:
    from weightgrad.sim.world import World


def schedule(world: World) -> None:
    """Put every fault of the plan on the clock."""
    for fault in world.plan.faults:
        world.clock.at(fault.at, lambda fault=fault: _strike(world, fault))  # type: ignore[misc]


def _note(world: World, what: str, where: tuple[str, ...]) -> None:
    world.ledger.write("fault", world.clock.now, what=what, where=list(where))


def _strike(world: World, fault: Fault) -> None:
    if fault.what in ("cut", "slow"):
        _scale(world, fault, 0.0 if fault.what == "cut" else fault.factor)
        if fault.seconds is not None:
            world.clock.after(fault.seconds, lambda: _scale(world, fault, 1.0))
    elif fault.what == "flap":
        _flap(world, fault, fault.at + (fault.seconds or 0.0), cut=True)
    elif fault.what == "kill" and world.plan.server in fault.where:
        _kill_server(world, fault)
    elif fault.what == "kill":
        _kill_site(world, fault)
    elif fault.what == "join":
        _return_site(world, fault, "join")
    elif fault.what == "leave":
        _note(world, "leave", fault.where)
        for name in fault.where:
            world.by_name[name].leaving = True
            world.boundary(world.by_name[name])


def _scale(world: World, fault: Fault, factor: float) -> None:
    _note(world, "heal" if factor == 1.0 else fault.what if fault.what != "flap" else "cut", fault.where)
    world.links.scale(world.clock.now, world.links.place(*fault.where), factor, fault)
    world.replan()


def _flap(world: World, fault: Fault, until: float, *, cut: bool) -> None:
    over = world.clock.now >= until
    _scale(world, fault, 0.0 if cut and not over else 1.0)
    if not over:
        world.clock.after(fault.period / 2, lambda: _flap(world, fault, until, cut=not cut))


def _kill_site(world: World, fault: Fault) -> None:
    _note(world, "kill", fault.where)
    for name in fault.where:
        one = world.by_name[name]
        one.alive = False
        one.life += 1
        if one.waiting_since is not None:
            one.times.waiting += world.clock.now - one.waiting_since
            one.waiting_since = None
        world.links.drop(world.clock.now, name)
    world.replan()
    if fault.seconds is not None:
        world.clock.after(fault.seconds, lambda: _return_site(world, fault, "return"))


def _return_site(world: World, fault: Fault, what: str) -> None:
    _note(world, what, fault.where)
    for name in fault.where:
        world.come_back(world.by_name[name])


def _kill_server(world: World, fault: Fault) -> None:
    _note(world, "kill", fault.where)
    world.server_alive = False
    for one in world.sites:
        world.links.drop(world.clock.now, one.place.name)
    world.replan()
    if fault.seconds is not None:
        world.clock.after(fault.seconds, lambda: _return_server(world, fault))


def _return_server(world: World, fault: Fault) -> None:
    if world.server_alive:
        return  # it was killed twice, and is back
    _note(world, "return", fault.where)
    world.server_alive = True
    world.restore_server()
