"""Folders, locks and databases on disk, and threads that wait for them."""
