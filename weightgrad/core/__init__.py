"""Synchronisation between sites: the global model, the residual, and the parts that make a strategy.

Everything here is pure: messages and the time go in, messages come out. `site_state` and `server_state` are the two
state machines, `strategies` the table of strategies; the other files are the parts of a strategy (triggers, selectors,
aggregators, consistency, resume, controller) and the objects they work on.
"""

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.residual import Residual
from weightgrad.core.server.state import ServerState
from weightgrad.core.site.state import SiteState
from weightgrad.core.strategies import Strategy, available, find

__all__ = ["GlobalModel", "Residual", "ServerState", "SiteState", "Strategy", "available", "find"]
