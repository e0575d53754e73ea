"""`warmroute demo`: a whole fleet on one machine, and a workload that shows what routing by prefix does."""
