"""Frozen parameters with different values at different sites, without a server."""

from __future__ import annotations

import pytest

from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.server.votes import FrozenVote


def request(site: str, **frozen: str) -> AdmissionRequest:
    return AdmissionRequest(site, [("weight", [2])], -1, frozen=frozen)


def test_of_two_sites_the_second_is_refused_until_it_has_the_same_values() -> None:
    reasons: list[str] = []
    vote = FrozenVote(2, reasons.append)
    vote.check(request("east", embedding="a"))
    with pytest.raises(RefusedError, match="west has other values in it than east"):
        vote.check(request("west", embedding="b"))
    assert reasons == ["other frozen parameters"]
    vote.check(request("west", embedding="a"))


def test_the_first_of_three_does_not_shut_out_the_majority() -> None:
    vote = FrozenVote(3, lambda reason: None)
    vote.check(request("mallory", embedding="bad"))
    with pytest.raises(LinkError, match="No majority has said yet"):
        vote.check(request("east", embedding="good"))
    vote.check(request("west", embedding="good"))
    vote.check(request("east", embedding="good"))
    with pytest.raises(RefusedError, match="mallory has other values in it than"):
        vote.check(request("mallory", embedding="bad"))


def test_parameters_of_other_names_are_not_compared_and_a_site_can_be_forgotten() -> None:
    vote = FrozenVote(2, lambda reason: None)
    vote.check(request("east", embedding="a"))
    vote.check(request("west", head="b"))
    vote.forget("east")
    vote.check(request("west", embedding="b"))
