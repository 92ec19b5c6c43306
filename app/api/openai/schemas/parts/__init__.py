"""Parts of messages: texts, images and files."""
