"""Sinks: where documents go. `base` has their contract, `registry` their names in config files."""
