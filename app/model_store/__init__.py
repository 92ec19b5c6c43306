"""The models on this machine: those in the hub's cache, in a folder, and the bundled one."""
