"""Results of runs as text, tables and HTML pages."""
