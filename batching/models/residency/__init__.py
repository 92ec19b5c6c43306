"""Decides which models are loaded: pure, without threads, engines or a clock."""
