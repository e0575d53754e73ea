"""Sans-IO parsers and state machines: bytes and events in, values and actions out."""
