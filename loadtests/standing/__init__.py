"""Who is best at the knee? See `loadtests/README.md`."""
