"""WHAT moves: components, and how they are declared."""
