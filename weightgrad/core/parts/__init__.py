"""The parts that a strategy is made of, and the language in which they are written."""

from weightgrad.core.parts.language import available, check, name_of, parse, part, to_text

__all__ = ["available", "check", "name_of", "parse", "part", "to_text"]
