"""The proof ladder: how it is shown that a fast path is right."""
