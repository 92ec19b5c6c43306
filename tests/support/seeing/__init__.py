"""A tiny Qwen3-VL that really sees: trained here in minutes to name colours, digits and numbers of dots.

`python -m tests.support.seeing FOLDER` trains it and writes a folder as the Hugging Face hub has them.
"""
