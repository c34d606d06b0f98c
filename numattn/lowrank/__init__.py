"""Low-rank attention: project, sample or factor the attention matrix."""
