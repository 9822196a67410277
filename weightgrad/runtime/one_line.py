"""Log records that stay one line each, of bounded length, whatever a site has written into a name."""

from __future__ import annotations

import logging
import re

_MOST_CHARACTERS = 2000  # a name of a megabyte in every line would fill the disk
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class OneLine(logging.Filter):
    """Writes control characters as escapes, so that nobody can forge a line or command a terminal, and no long text."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape and shorten the text of a record; every record passes."""
        text = record.getMessage()
        if _CONTROL.search(text) or len(text) > _MOST_CHARACTERS:
            record.msg, record.args = shortened(escaped(text[: 2 * _MOST_CHARACTERS])), None
        return True


def shortened(text: str) -> str:
    """The beginning of a text that is very long."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def escaped(text: str) -> str:
    """The text with its control characters as escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
