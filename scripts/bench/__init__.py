"""The benchmark over HTTP: this server, and others beside it, under streaming clients."""
