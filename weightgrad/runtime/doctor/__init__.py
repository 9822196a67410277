"""What can be wrong between a site and the global server, measured before a run and when a site joins."""
