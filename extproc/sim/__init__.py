"""A modelled vLLM engine, driven by a time that is passed in."""
