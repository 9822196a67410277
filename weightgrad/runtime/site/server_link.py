"""A rank's connection to one server process, and the download that comes over it.

Parts of a download are kept in the order in which they came, together with the results between them, until the rank is
told to load them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from weightgrad.core.site.shard import SiteShard
from weightgrad.runtime.transport.transport import ClientTransport
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import ModelPart, ResultPart, RoundResult


class LinkDownload:
    """What has come of a download, and the results between its parts.

    Attributes:
        loaded: the version of the last download; results up to it are in it already.
    """

    def __init__(self) -> None:
        self.loaded = -1
        self._collected: deque[ModelPart | ResultPart] | None = None  # in order; None if no download has begun

    def __bool__(self) -> bool:
        """Whether a part waits to be loaded."""
        return bool(self._collected)

    @property
    def complete(self) -> bool:
        """Whether the last part of a download has come and was not loaded yet."""
        return any(isinstance(one, ModelPart) and one.last for one in self._collected or ())

    def add_part(self, part: ModelPart) -> None:
        """A part of a download has come."""
        self._collected = deque() if self._collected is None else self._collected
        self._collected.append(part)

    def add_result(self, part: ResultPart) -> None:
        """A result has come: what is loaded before it, if a download is under way, does not contain it."""
        if self._collected is not None and not self.complete:
            self._collected.append(part)

    def forget(self) -> None:
        """The process was restarted: what it had sent is void."""
        self.loaded, self._collected = -1, None

    def load_next(self, shard: SiteShard) -> bool:
        """Load the part that waits.

        Returns:
            Whether it was the last one.
        """
        assert self._collected is not None
        message = self._collected.popleft()
        if isinstance(message, ResultPart):
            result = RoundResult(version=message.version, round=0, step=0, segments=message.segments)
            shard.load_result(replace(result, relayed=message.relayed))
            self.loaded = max(self.loaded, message.version if message.last else -1)
            return False
        for segment in message.segments:
            shard.load(message.vector, segment)
        if message.last:
            self.loaded, self._collected = max(self.loaded, message.version), None
        return message.last


@dataclass
class ServerLink:
    """The connection to one server process.

    Attributes:
        client: the transport.
        served: the elements that the process serves, of those that the rank holds.
        request: what the rank says to be admitted; rank 0 has another way with the coordinator.
        download: what has come of a download.
        gone: whether the process was restarted and has not let the rank in again.
    """

    client: ClientTransport
    served: Intervals
    request: bytes
    download: LinkDownload = field(default_factory=LinkDownload)
    gone: bool = False
