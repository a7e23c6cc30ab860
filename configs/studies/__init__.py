"""The paper's studies: each file has a recipe and the grid of its runs, for `python -m vit_jax.sweep`."""
