"""LoRA adapters: their files, which layers they fit to, and their slots in the device's memory."""
