"""The ledger, its turns and its scopes: unit tests, property tests, and mutants that these must catch."""
