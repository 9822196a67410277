"""Which site brings the first global model, without a server."""

from __future__ import annotations

import pytest

from weightgrad.core.layout import Layout
from weightgrad.core.strategies import find
from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.first_site import FirstSite
from weightgrad.runtime.server.roster import Roster

SITES = ("east", "west", "north")
SMALL = Layout.of_shapes([("weight", (2,))])
LARGE = Layout.of_shapes([("weight", (3,))])


def choice(
    named: str | None = None, strategy: str = "diloco", agree_s: float = 1e6, sites: tuple[str, ...] = SITES
) -> FirstSite:
    config = RunConfig(sites=sites, fit=lambda numel: find(strategy), seed=1)
    return FirstSite(config, Roster(sites), named=named, agree_s=agree_s, on_refused=lambda reason: None)


def ask(first: FirstSite, site: str, layout: Layout = SMALL, **optimizer: object) -> None:
    shapes = [(slot.name, list(slot.shape)) for slot in layout.slots]
    first.check(AdmissionRequest(site, shapes, -1, optimizer=optimizer or None), layout)


def test_of_two_sites_the_first_brings_it() -> None:
    ask(choice(sites=("east", "west")), "west")


def test_of_three_sites_two_must_want_the_same_model() -> None:
    first = choice()
    with pytest.raises(LinkError, match="1 of the 3 sites, and 2 are needed"):
        ask(first, "north", LARGE)
    with pytest.raises(LinkError, match="not agreed on a model yet"):
        ask(first, "east")
    ask(first, "west")
    with pytest.raises(RefusedError, match=r"weight is \[3\], the others have \[2\]"):
        ask(first, "north", LARGE)


def test_where_gradients_are_shared_the_optimizer_belongs_to_the_vote() -> None:
    first = choice(strategy="baseline")
    for site, kind in (("east", "SGD"), ("west", "Adam")):
        with pytest.raises(LinkError, match="1 of the 3 sites"):
            ask(first, site, kind=kind)
    ask(first, "north", kind="Adam")
    with pytest.raises(RefusedError, match="it has another optimizer"):
        ask(first, "east", kind="SGD")


def test_a_named_site_goes_before_any_vote() -> None:
    first = choice(named="north")
    with pytest.raises(LinkError, match="north sends the first global model"):
        ask(first, "east")
    ask(first, "north", LARGE)


def test_a_site_that_was_passed_over_comes_last() -> None:
    first = choice(agree_s=0.0)
    first.pass_over("east")
    with pytest.raises(LinkError, match="east did not send the first global model in time"):
        ask(first, "east")
    ask(first, "west")
    first.pass_over("west")
    first.pass_over("north")
    ask(first, "east")
