"""The file itself: its header, and tensors in blocks of quantized numbers."""
