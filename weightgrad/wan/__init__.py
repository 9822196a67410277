"""Between sites: base + pending, and the parts that make a strategy. Pure: messages and the time in, messages out.

`strategies` is the table; `site_end` and `global_server` are the two state machines; the other files
are the parts (triggers, selectors, aggregators, consistency, resume) and what they work on.
"""

from weightgrad.wan.base import Base
from weightgrad.wan.global_server import GlobalServer
from weightgrad.wan.messages import Answer, Part, Push
from weightgrad.wan.outbound import Outbound
from weightgrad.wan.site_end import SiteEnd
from weightgrad.wan.strategies import Strategy, available, find

__all__ = ["Answer", "Base", "GlobalServer", "Outbound", "Part", "Push", "SiteEnd", "Strategy", "available", "find"]
