"""Files of LoRA adapters, as mlx-lm and PEFT write them, and which layers of a model they fit to."""
