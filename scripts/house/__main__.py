"""Draws the picture: `python -m scripts.house`."""

from scripts.house.picture import HOUSE, ROOT, picture

if __name__ == "__main__":
    (ROOT / HOUSE).write_text(picture(), encoding="utf-8")
