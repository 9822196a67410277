"""Measurements of codecs and machines."""
