"""Triton: write, select and attend from one source for every GPU that Triton compiles for."""
