"""A long run of a live server, with bounds; and the clients of the reliability tests."""
