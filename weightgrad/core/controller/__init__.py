"""The controller of `auto`: what the server measures, and the sync schedule and codecs that follow from it."""
