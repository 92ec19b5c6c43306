"""LoRA adapters in the device's memory, and what they add to the rows of a step."""
