"""A step as a message of plain values: plan in, outputs back."""
