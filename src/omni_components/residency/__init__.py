"""WHO may be there, WHEN: the invariant lives here."""
