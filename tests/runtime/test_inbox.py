"""The inbox of a server process: control first, and each peer's bulk only up to its limit."""

from __future__ import annotations

import threading

from weightgrad.runtime.server.inbox import Inbox


def test_control_is_handed_out_before_bulk_and_each_in_its_order() -> None:
    inbox: Inbox[str] = Inbox()
    for name in ("a", "b"):
        inbox.put_bulk(f"bulk {name}", "east", 10)
        inbox.put_control(f"control {name}")
    found = [inbox.get(0.0) for _ in range(5)]
    assert found == ["control a", "control b", "bulk a", "bulk b", None]


def test_bulk_comes_through_a_flood_of_control_messages() -> None:
    """However fast one site sends them, and also if each that is taken makes room for another."""
    inbox: Inbox[str] = Inbox()
    inbox.put_bulk("values", "west", 10)
    inbox.put_bulk("more", "west", 10)
    found = []
    for _ in range(200):
        inbox.put_control("noise", "east", 10)
        inbox.put_control("noise", "east", 10)
        found.append(inbox.get(0.0))
    assert [place for place, name in enumerate(found) if name != "noise"] == [64, 129]
    assert inbox.get(0.0, accepts=lambda item: False) is None


def test_get_wakes_up_when_something_comes() -> None:
    inbox: Inbox[str] = Inbox()
    sender = threading.Thread(target=inbox.put_control, args=("now",))
    sender.start()
    assert inbox.get(60.0) == "now"
    sender.join()


def test_a_peer_with_too_much_waits_and_the_others_do_not() -> None:
    inbox: Inbox[str] = Inbox(bulk_bytes=100)
    inbox.put_bulk("first", "east", 60)
    waiting = threading.Thread(target=inbox.put_bulk, args=("second", "east", 60))
    waiting.start()
    inbox.put_bulk("other", "west", 100)
    inbox.put_control("control")
    assert waiting.is_alive(), "60 and 60 are more than 100"
    assert [inbox.get(0.0) for _ in range(2)] == ["control", "first"]
    waiting.join(60)
    assert not waiting.is_alive()
    assert [inbox.get(0.0) for _ in range(3)] == ["other", "second", None]


def test_one_message_is_always_taken() -> None:
    """Or one that is larger than the limit would wait for ever."""
    inbox: Inbox[str] = Inbox(bulk_bytes=100)
    inbox.put_bulk("large", "east", 1000)
    assert inbox.get(0.0) == "large"
    inbox.put_bulk("again", "east", 1000)
    assert inbox.get(0.0) == "again"


def test_what_was_taken_makes_room() -> None:
    inbox: Inbox[int] = Inbox(bulk_bytes=100)
    for number in range(50):
        inbox.put_bulk(number, "east", 100)
        assert inbox.get(0.0) == number


def test_closing_lets_nobody_wait() -> None:
    inbox: Inbox[str] = Inbox(bulk_bytes=100)
    inbox.put_bulk("first", "east", 100)
    waiting = threading.Thread(target=inbox.put_bulk, args=("second", "east", 100))
    waiting.start()
    inbox.close()
    waiting.join(60)
    assert not waiting.is_alive()
