"""What a model's text says: an answer, reasoning, and tool calls; and how a conversation is told to it.

Text in, events out: nothing here knows tokens, the engine or HTTP.
"""
