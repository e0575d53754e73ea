"""The part that decides: pure, synchronous, time passed in. No I/O, no clock, no logging."""
