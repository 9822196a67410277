"""Certificates and mutual TLS."""
