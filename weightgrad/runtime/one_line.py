"""Log records that stay one line each, whatever a site has written into a name."""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class OneLine(logging.Filter):
    """Writes control characters as escapes, so that nobody can forge a line or command a terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape the text of a record; every record passes."""
        text = record.getMessage()
        if _CONTROL.search(text):
            record.msg, record.args = escaped(text), None
        return True


def escaped(text: str) -> str:
    """The text with its control characters as escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
