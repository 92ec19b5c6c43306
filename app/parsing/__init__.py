"""The formats of messages: parsers of generated text, and grammars that enforce them.

A parser takes text and returns events; it knows no tokens, engine or HTTP.  Formats and grammars refer
to a model's tokens.
"""
