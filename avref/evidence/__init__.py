"""The evidence: traces of drafters on the target's own samples, and policies replayed on them."""
