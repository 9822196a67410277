"""A script that ends without `leave`, by an error or Ctrl-C perhaps: the other sites must not wait for this one."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


class ScriptEnd:
    """Leaves for a site whose script has ended.

    After an error a site with a checkpoint may be started again, by torchrun for example, and is waited for. A forked
    child, such as a worker of a DataLoader, has nothing to say.

    Args:
        leave: What is done then.
        resumable: Whether the site has a checkpoint.
    """

    def __init__(self, leave: Callable[[], None], *, resumable: bool) -> None:
        self._leave, self._resumable = leave, resumable
        self._pid = os.getpid()

    def watch(self) -> None:
        """From now on the others would wait."""
        atexit.register(self.reached)

    def forget(self) -> None:
        """The site has left."""
        atexit.unregister(self.reached)

    def reached(self) -> None:
        """Called by Python when the script has ended."""
        error = getattr(sys, "last_type", None)  # of the error that ends the script
        returns = self._resumable and error not in (None, KeyboardInterrupt)
        if not returns and os.getpid() == self._pid:
            self._leave()
