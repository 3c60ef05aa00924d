"""The page of all public names is what the code says, and the code says it of every name."""

import api_page
import pytest

PUBLIC = [(name, one) for _, _, names in api_page.sections() for name, one in names.items() if api_page._is_ours(one)]


def test_the_page_is_up_to_date():
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page(), "run: python tests/api_page.py"


@pytest.mark.parametrize(("name", "one"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_every_public_name_says_what_it_is(name, one):
    undocumented = [name] if not one.__doc__ or one.__doc__.startswith(f"{name}(") else []  # a dataclass's own
    undocumented += [f"{name}.{label}" for label, member in api_page.members(one) if not member.__doc__]
    assert not undocumented


def test_every_public_name_is_on_the_page():
    import mlx_linattn

    page = api_page.page()
    assert all(f"\n### {name}\n" in page for name in mlx_linattn.__all__)
