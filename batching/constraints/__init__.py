"""Grammars and schemas as masks of allowed tokens."""
