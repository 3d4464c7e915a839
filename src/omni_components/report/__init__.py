"""Events as a table and as pictures."""
