"""Engines that sparse-mla plugs into."""
