"""All I/O: sockets, files, clocks. Nothing here decides where a request goes."""
