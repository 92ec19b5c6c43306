"""The models that a server can serve: which of them are loaded, which make room, and for whom."""
