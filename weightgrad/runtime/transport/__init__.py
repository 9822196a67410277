"""The transport between sites and the global server: whole messages, each once and in the order of its lane."""
