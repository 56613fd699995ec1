"""Models. None of them knows which residual connection it runs with."""
