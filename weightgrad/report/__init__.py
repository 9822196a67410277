"""Measurements into tables and pages."""
