"""Grammars that enforce the formats of tool calls."""
