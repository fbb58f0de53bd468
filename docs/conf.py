"""The site: sphinx-build -W --keep-going -b html docs OUT."""

import re
from importlib.metadata import version as _version
from typing import Any

project = "halfsilver"
author = "The halfsilver authors"
copyright = author
version = release = _version(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["html_image"]  # pages use <img> where a code host needs a width
myst_heading_anchors = 3  # the same anchors as on a code host

default_role = "py:obj"  # docstrings say `name`; it becomes a link where the name is documented
add_module_names = False
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Batch", "Callback", "LossFn", "Tensors")}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "halfsilver"
html_copy_source = False
html_static_path = html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6fb2", "color-brand-content": "#1f6fb2"},
    "dark_css_variables": {"color-brand-primary": "#7cb7e8", "color-brand-content": "#7cb7e8"},
}


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _readable)


def _readable(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> Any:
    """Without what Python's own repr puts in: defaults that are made by a factory, aliases inside of other types."""
    return tuple(
        s and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", s.replace("<factory>", "..."))
        for s in (signature, returns)
    )
