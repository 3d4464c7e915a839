"""HOW bytes travel."""
