"""The page of the images whose labels are doubted."""

import numpy as np

from tests.analysis.test_look import check_page
from vit_jax.analysis.doubts_page import Doubt, make_doubts_page


def test_the_page_stands_alone_and_counts_pairs():
    doubts = [Doubt(f"a/<{n}>.png", "cat & dog", "owl", 0.1, 0.8) for n in range(3)] + [Doubt("\udce9", "x", "y", 0, 1)]
    pixels = [np.full((8, 8, 3), 50 * n, np.uint8) for n in range(2)]
    page = make_doubts_page("Doubtful labels", ["4 labels are doubted."], doubts, pixels)
    page.encode()
    assert len(check_page(page).all("img")) == 2
    assert '<tr><th scope="row">cat &amp; dog</th><td>owl</td><td class="number">3</td></tr>' in page
    assert "a/&lt;1&gt;.png" in page and "a/&lt;2&gt;.png" not in page


def test_a_page_without_doubts_says_so():
    assert check_page(make_doubts_page("Doubtful labels", ["0 labels are doubted."], [], [])).all("figure") == []
