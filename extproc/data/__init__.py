"""Files that travel with the package: the tiny model."""
