"""The steps that a site repeats after it went on from a checkpoint older than its last push."""

from __future__ import annotations

from weightgrad.core.site.progress import SiteProgress


class Replay:
    """Pushes that the server has and the site has forgotten, which the site is about to make again.

    The server drops them, and their results apply at the same steps as before. Then the site goes where the others are.

    Args:
        progress: how far the site has come.

    Attributes:
        until: the last round whose push the server has already.
    """

    def __init__(self, progress: SiteProgress) -> None:
        self.until = 0
        self._progress = progress
        self._catch_up_to: tuple[int, int] | None = None  # (step, round) of the others

    def begin(self, until: int, catch_up_to: tuple[int, int] | None) -> None:
        """Begin to repeat steps.

        Args:
            until: the last round whose push the server has already.
            catch_up_to: the step and the round of the others, to go on from afterwards; None to go on by itself.
        """
        self.until, self._catch_up_to = until, catch_up_to

    @property
    def rounds(self) -> range:
        """The rounds whose pushes are still to be made again."""
        return range(self._progress.pushed_round + 1, self.until + 1)

    def catch_up(self) -> None:
        """Go on where the other sites are, if the replay is over."""
        if self._catch_up_to is not None and self._progress.pushed_round >= self.until:
            self._progress.catch_up(*self._catch_up_to)
            self._catch_up_to = None
