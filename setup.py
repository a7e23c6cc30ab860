"""What pyproject.toml cannot say: the recipes, which are in configs/, are installed as vit_jax/configs.

At the top level of site-packages they would hide a user's own folder `configs`. An editable install leaves them where
they are: mapping one package to another folder would replace its plain path by an import hook (see pyproject.toml).
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Builds the package with the recipes inside it."""

    def finalize_options(self) -> None:
        """Adds the recipes, unless the install is editable."""
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [*self.packages, "vit_jax.configs", "vit_jax.configs.studies"]
            self.package_dir = {**self.package_dir, "vit_jax.configs": "configs"}


setup(cmdclass={"build_py": BuildWithRecipes})
