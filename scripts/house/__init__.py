"""The picture of the house, docs/architecture/house.svg, drawn from the imports in the source.

python -m scripts.house     draw it again
"""
