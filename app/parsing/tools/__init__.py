"""Tool calls, parsed while they are generated."""
