"""Command line: argv to command. Thin."""
