"""How a site builds a push: what leaves the residual is encoded here, and the push counts as in flight."""

from __future__ import annotations

from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core.selectors import Selector
from weightgrad.core.site_parts import SiteParts
from weightgrad.core.site_schedule import StepTimer
from weightgrad.wire.messages import Push, Segment


class PushBuilder:
    """Starts a site's rounds with a push each. Memory: no full-size vector of its own.

    Attributes:
        samples: how many samples one of the site's steps sees, the weight of its pushes.
        rate: the learning rate to send with shared gradients, where the server does not know it.
    """

    def __init__(self, site: str, samples: int, parts: SiteParts, step_timer: StepTimer) -> None:
        self.samples = samples
        self.rate: float | None = None
        self._site = site
        self._parts = parts
        self._step_timer = step_timer

    def push_selected(
        self,
        now: float,
        fresh: Tensor,
        selector: Selector,
        *,
        fragment: int = 0,
        codec: Codec | None = None,
        final: bool = False,
    ) -> Push:
        """Start a round with what the selector takes out of the residual and the fresh update.

        Args:
            now: the time.
            fresh: what has been made since the last push; what does not leave goes into the residual.
            selector: chooses what leaves.
            fragment: which fragment of the model the round is about.
            codec: replaces the usual codec this once.
            final: whether this is the site's last push.

        Returns:
            The push.
        """
        segments = self._parts.residual.take(
            fresh,
            selector,
            self._parts.global_model.vector,
            step=self._parts.progress.step,
            count=self._parts.progress.round + 1,
            fragment=fragment,
            step_update=self._parts.steps.last,
            threshold=self._parts.steps.threshold_value,
            codec=self._parts.schedule.announced_codec if codec is None else codec,
        )
        return self._push(now, segments, final=final)

    def push_nothing(self, now: float, *, final: bool = False) -> Push:
        """Start a round with an empty push: the site has nothing significant to send."""
        return self._push(now, (), final=final)

    def _push(self, now: float, segments: tuple[Segment, ...], *, final: bool) -> Push:
        push = Push(
            site=self._site,
            round=self._parts.progress.start_round(),
            after=self._parts.progress.pushed_round,
            step=self._parts.progress.step,
            seen=self._parts.global_model.version,
            samples=self.samples,
            segments=segments,
            final=final,
            rate=self.rate,
            report=self._step_timer.report() if self._parts.schedule.current is not None else None,
        )
        self._parts.progress.pushed()
        self._parts.in_flight.add(push, now)
        return push
