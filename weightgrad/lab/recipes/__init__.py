"""Recipes: one YAML file that says everything a run depends on."""
