"""Tools that a request offers, and its choice of them."""
