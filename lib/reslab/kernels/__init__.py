"""Fused operations, each a folder: `naive.py` is its definition, against which everything else is tested."""
