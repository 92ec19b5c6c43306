"""Schemas that OpenAI's APIs share."""
