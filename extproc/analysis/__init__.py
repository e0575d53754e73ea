"""What logs say about prefixes: what repeats, what breaks it, what routing would save. No I/O."""
