"""The next token, at every position of a text."""

METRICS = ("perplexity", "bits_per_byte")
