"""What an installation consists of, by the metadata of the packages that are here."""

import re
import tomllib

from packaging.utils import canonicalize_name

from docs import packages
from tests.conftest import ROOT


def test_the_table_names_who_requires_each_package():
    found = packages.find_packages()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {canonicalize_name(re.split(r"[<>=]", one)[0]) for one in declared}
    assert {name for name, requirers in found.items() if packages.PROJECT in requirers} == names
    assert "jax" in found["scipy"] and packages.PROJECT not in found["scipy"] and "scikit-learn" not in found
    table = packages.make_table()
    assert table.splitlines()[-1].startswith(f"| all {len(found)} |") and len(table.splitlines()) < 20
    page = (ROOT / "CONTRIBUTING.md").read_text()
    written = re.search(r"<!-- packages -->\n(.*?)<!-- /packages -->", page, re.S)[1]
    shown = re.findall(r"^\| ([a-z][a-z-]+) \| \d", written, re.M)
    assert len(shown) >= 8 and set(shown) <= found.keys()
