"""Benchmarks of every backend beside every peer: ``python -m headmux.bench``."""
