"""Generated from `proto/` (see `proto/README.md`); never edited by hand."""
