"""Split versions of real models."""
