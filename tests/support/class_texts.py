"""Texts of two classes."""

LABELS = ("World", "Sports", "Business", "Sci/Tech")
TEXTS = ["stocks fell in late trading", "the striker scored twice in the final", "a probe reached the moon of a planet"]
