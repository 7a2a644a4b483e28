"""Backends: a row of ``table.py`` each; only binding a kernel imports its module."""
