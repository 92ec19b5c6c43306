"""Parses the text of a model into content, reasoning and tool calls.

Text in, events out: nothing here depends on tokens, the engine or HTTP.
"""
