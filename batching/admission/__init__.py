"""Admission into the batch: which waiting requests start, and which make way for them."""
