"""Recipes: `base.py` declares every field, the others are short differences from it."""
