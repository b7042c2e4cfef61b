import sys

import pytest

from dlrover import __version__, extras
from dlrover.errors import ConfigurationError


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigurationError) as caught, extras.needed("job.yaml", "roles"):
        import yaml  # noqa: F401
    assert str(caught.value) == (
        f"job.yaml needs the package yaml: pip install 'dlrover[roles]>={__version__}'."
    )


def test_a_missing_module_of_a_package_names_the_package():
    with (
        pytest.raises(ConfigurationError, match="needs the package surely_not_there:"),
        extras.needed("--auto-scale", "planning"),
    ):
        import surely_not_there.part  # noqa: F401


def test_a_module_that_dlrover_itself_lacks_is_a_defect():
    with pytest.raises(ModuleNotFoundError), extras.needed("--auto-scale", "planning"):
        import dlrover.surely_not_there  # noqa: F401


def test_what_is_required_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    extras.require("--auto-scale", "planning", ("this",))
    assert "this" not in sys.modules
    with pytest.raises(ConfigurationError) as caught:
        extras.require("--auto-scale", "planning", ("this", "surely_not_there"))
    assert str(caught.value) == (
        f"--auto-scale needs the package surely_not_there: pip install 'dlrover[planning]>={__version__}'."
    )
