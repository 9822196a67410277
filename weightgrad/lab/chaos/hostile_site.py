"""A site with a valid certificate that does its worst: the real client, with messages that no correct site sends.

One `session` enters, misbehaves a few times in ways that are drawn from a seed, and ends in one of several ways. None
of its pushes can be accepted, so that the other sites must end with the bits of a run without it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weightgrad.codecs import Fp32
from weightgrad.errors import WeightGradError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack
from weightgrad.wire.messages import FinalPart, Holding, Join, Leave, Message, ModelPart, Push, PushPart, Segment
from weightgrad.wire.sync_schedule import Report

_LARGEST = 2**32 - 1

Layout = list[tuple[str, list[int]]]
Numbers = dict[str, Any]


class HostileSite:
    """A site that misbehaves.

    Args:
        address: HOST:PORT of the global server.
        name: its name, which its certificate proves.
        credentials: its certificates; None without TLS.
        layout: name and shape of every parameter of the model that is trained.
        seed: of what it does.
        timeout_s: seconds that it tries to enter.
    """

    def __init__(
        self,
        address: str,
        name: str,
        credentials: Credentials | None,
        layout: Layout,
        seed: int,
        timeout_s: float = 5.0,
    ) -> None:
        self._address, self._name, self._layout = address, name, layout
        self._credentials = None if credentials is None else credentials.for_client()
        self._numel = sum(_product(shape) for _, shape in layout)
        self._draw, self._timeout_s = random.Random(seed), timeout_s
        self.sessions = 0
        self.done: dict[str, int] = {}
        """How often it has done what."""
        self._client: GrpcClient | None = None

    def session(self) -> None:
        """Enter, misbehave, and end. What the server says to it does not matter."""
        self.sessions += 1
        channels = GrpcChannels(self._address, credentials=self._credentials, options=channel_options(streams=1))
        client = self._client = GrpcClient(channels, site=self._name, incarnation=f"{self._name} {self.sessions}")
        try:
            client.enter(self._request(), self._timeout_s)
            client.start()
            if self._draw.random() < 0.8:
                self._send(Holding(site=self._name, rank=0, ranks=1, epoch=self.sessions, held=self._whole))
            for _ in range(self._draw.randint(1, 6)):
                deed = self._draw.choice(self._deeds)
                self.done[deed.__name__] = self.done.get(deed.__name__, 0) + 1
                deed()
            if self._draw.random() < 0.5:
                client.receive(0.05)
        except WeightGradError:
            pass  # it is refused, as it should be
        finally:
            client.abort() if self._draw.random() < 0.5 else client.close(0.1)

    @property
    def _whole(self) -> Intervals:
        return Intervals.whole(self._numel)

    @property
    def _deeds(self) -> list[Callable[[], None]]:
        return [
            self.wrong_numbers,
            self.poisoned_values,
            self.future_parts,
            self.unfinished_parts,
            self.joins,
            self.others_names,
            self.noise,
            self.wrong_lane,
            self.segments_outside,
            self.first_models,
            self.final_states,
            self.hostile_reports,
            self.contradictory_holdings,
            self.known_pushes,
            self.silence,
        ]

    def _request(self) -> bytes:
        request = AdmissionRequest(self._name, self._layout, 0, epoch=self.sessions).pack()
        if self._draw.random() < 0.9:
            return request
        wrong: list[bytes] = [
            b"[" * 50_000,
            request[: len(request) // 2],
            AdmissionRequest(self._name, [("weight", [2**40, 2**40])], -1).pack(),
            AdmissionRequest(self._name, [("a\nb", [1])], -1).pack(),
            AdmissionRequest(self._name, self._layout, _LARGEST).pack(),
            AdmissionRequest(self._name, self._layout, 0, workers=10**9).pack(),
        ]
        return self._draw.choice(wrong)

    def _send(self, message: Message | bytes, *, control: bool | None = None) -> None:
        assert self._client is not None
        data = message if isinstance(message, bytes) else pack(message)
        own = not isinstance(message, bytes | PushPart | Holding | ModelPart)
        self._client.send(data, control=own if control is None else control)

    def _push(self, **numbers: Any) -> Push:
        given = {"round": 1, "after": 0, "step": 1, "seen": 0, "samples": 1, **numbers}
        return Push(site=self._name, **given)

    def _part(self, round_: int, values: torch.Tensor, *, start: int = 0, last: bool = True) -> PushPart:
        payload, _ = Fp32().encode(torch.zeros(values.numel()), {}, 0)
        payload = replace(payload, body=values.contiguous().view(torch.uint8))
        return PushPart(site=self._name, round=round_, rank=0, segments=(Segment(start, payload),), last=last)

    # -- what it does ----------------------------------------------------------------------------

    def wrong_numbers(self) -> None:
        """A push that is far ahead, or claims what cannot be; it has no values, and is never complete."""
        number = self._draw.choice([_LARGEST, 2**31, 10**6])
        wrong = self._draw.choice(["round", "step", "rate", "seen"])
        if wrong == "round":
            self._send(self._push(round=number, samples=_LARGEST))
        elif wrong == "step":
            self._send(self._push(round=self._draw.randint(1, 5), step=number))
        elif wrong == "rate":
            self._send(self._push(rate=1e300))
        else:
            self._send(self._push(seen=number))

    def poisoned_values(self) -> None:
        """A whole push whose values are not finite, or far too large."""
        values = torch.full((self._numel,), self._draw.choice([float("nan"), float("inf"), 1e30, -1e20]))
        round_ = self._draw.randint(1, 40)
        self._send(self._part(round_, values))
        self._send(self._push(round=round_, after=self._draw.randint(0, round_ - 1), samples=_LARGEST, final=True))

    def future_parts(self) -> None:
        """Small parts of pushes for many rounds."""
        for _ in range(self._draw.randint(1, 60)):
            self._send(PushPart(site=self._name, round=self._draw.randint(1, _LARGEST), rank=0, segments=(), last=True))

    def unfinished_parts(self) -> None:
        """A push that never ends."""
        round_ = self._draw.randint(1, 20)
        for _ in range(self._draw.randint(1, 60)):
            self._send(self._part(round_, torch.zeros(self._numel), last=False))

    def joins(self) -> None:
        """Joins whose replies it does not read."""
        for _ in range(self._draw.randint(1, 60)):
            self._send(Join(site=self._name, version=self._draw.choice([-1, 0, 10**6]), epoch=self.sessions))

    def others_names(self) -> None:
        """In the name of another site."""
        other = self._draw.choice(["east", "west", "", "x" * 200]) or "nobody"
        said: list[Message] = [Leave(site=other), replace(self._push(), site=other), Join(site=other, version=0)]
        self._send(self._draw.choice(said))

    def noise(self) -> None:
        """Bytes that are no message, or one that is damaged."""
        said: list[Message] = [self._push(), Join(site=self._name, version=0), Leave(site=self._name)]
        data = bytearray(pack(self._draw.choice(said)))
        for _ in range(self._draw.randint(1, 4)):
            data[self._draw.randrange(len(data))] = self._draw.randrange(256)
        self._send(self._draw.choice([bytes(data), self._draw.randbytes(self._draw.randint(0, 3000))]), control=True)

    def wrong_lane(self) -> None:
        """A message on the lane of the other kind."""
        self._send(self._push(), control=False)

    def segments_outside(self) -> None:
        """Values for elements that the model has not."""
        self._send(self._part(1, torch.ones(4), start=self._numel - 2))

    def first_models(self) -> None:
        """A first global model, long after there is one."""
        part = self._part(1, torch.full((self._numel,), float("nan")))
        self._send(ModelPart(version=0, vector="weights", segments=part.segments, last=True))

    def final_states(self) -> None:
        """Parts of a final state, in any order, that are no file."""
        place = self._draw.choice([0, 0, 3])
        self._send(FinalPart(site=self._name, place=place, parts=place + 1, data=self._draw.randbytes(1000)))

    def hostile_reports(self) -> None:
        """A report with times that nobody measures, on a push that is far ahead."""
        self._send(self._push(round=_LARGEST, report=Report(1e308, _LARGEST, 1e308, 1e308)))

    def contradictory_holdings(self) -> None:
        """One of several ranks that holds every second element, while others never come, or other numbers of ranks."""
        held = Intervals(tuple((at, at + 1) for at in range(0, self._numel, 2)))
        for _ in range(self._draw.randint(1, 40)):
            epoch, ranks = self.sessions + self._draw.randint(0, 3), self._draw.choice([2, 3, _LARGEST])
            self._send(Holding(site=self._name, rank=0, ranks=ranks, epoch=epoch, held=held))

    def known_pushes(self) -> None:
        """Pushes whose values never come, and options of an optimizer that no step can be taken with."""
        options = tuple(self._draw.choice([-1e308, 1.0, 1e308]) for _ in range(self._draw.randint(1, 5)))
        for _ in range(self._draw.randint(1, 100)):
            self._send(self._push(round=self._draw.randint(1, 30), rate=0.1, options=options))

    def silence(self) -> None:
        """Nothing, for a while."""
        time.sleep(self._draw.uniform(0.0, 0.05))


def _product(shape: list[int]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found
