"""Middleware: keys, limits of bodies, disconnects, errors."""
