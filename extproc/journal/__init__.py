"""The journal: everything a router was told, so that what it decided can be decided again."""
