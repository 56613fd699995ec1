"""reslab: what residual connections do in Transformers, and what attention over depth changes."""

__version__ = "0.1.0"
