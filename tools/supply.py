"""What halfsilver is made of: an SBOM of the installed dependencies (CycloneDX JSON), and the table of their licences.

    python -m tools.supply > sbom.json
    python -m tools.supply --write       # docs/licences.md

Both follow the names in pyproject.toml through the metadata of what is installed. They hold no date and no path: the
same environment gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
_BEGIN = "<!-- licences:begin -->"


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def groups() -> dict[str, list[str]]:
    """What is asked for by the core, and by each extra."""
    return {"core": project()["dependencies"], **project()["optional-dependencies"]}


def closure(asked: Iterable[str]) -> dict[str, set[str]]:
    """Every package that the requirements lead to on this machine, with those that it needs itself."""
    rest, edges, seen = [Requirement(line) for line in asked], dict[str, set[str]](), set[tuple[str, frozenset[str]]]()
    while rest:
        wanted = rest.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            needed = _needed(name, extras)
            edges.setdefault(name, set()).update(canonicalize_name(n.name) for n in needed)
            rest += needed
    return edges


@cache
def _needed(name: str, extras: frozenset[str]) -> list[Requirement]:
    found = [Requirement(line) for line in metadata.requires(name) or ()]
    return [n for n in found if not n.marker or any(n.marker.evaluate({"extra": e}) for e in ("", *extras))]


def licence(about: Mapping[str, Any]) -> str:
    """As the package's metadata state it: an SPDX expression, else a short name, else classifiers."""
    text = about.get("license_expression") or about.get("license") or "UNKNOWN"
    if text != "UNKNOWN" and "\n" not in text:
        return str(text)
    kinds = [line.split(" :: ")[-1] for line in about.get("classifier", ()) if line.startswith("License ::")]
    return " / ".join(kind for kind in kinds if kind != "DFSG approved") or "not stated"


@cache
def _about(name: str) -> tuple[str, str | None, str]:
    """Version, SPDX expression if there is one, and licence in words."""
    found: dict[str, Any] = metadata.metadata(name).json
    return str(found["version"]), found.get("license_expression"), licence(found)


def sbom() -> dict[str, Any]:
    """CycloneDX 1.6: each component with version, licence and whether the core needs it, and who needs whom."""
    edges, core = closure(line for lines in groups().values() for line in lines), closure(groups()["core"])
    refs = {name: f"pkg:pypi/{name}@{_about(name)[0]}" for name in sorted(edges)}
    own = {"type": "library", "name": "halfsilver", "version": project()["version"], "bom-ref": "halfsilver"}
    asked = sorted({canonicalize_name(Requirement(line).name) for lines in groups().values() for line in lines})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [_component(name, ref, name in core) for name, ref in refs.items()],
        "dependencies": [
            {"ref": ref, "dependsOn": [refs[n] for n in sorted(needed)]}
            for ref, needed in [("halfsilver", asked), *((refs[name], edges[name]) for name in refs)]
        ],
    }


def _component(name: str, ref: str, needed: bool) -> dict[str, Any]:
    version, spdx, text = _about(name)
    return {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": version,
        "purl": ref,
        "scope": "required" if needed else "optional",
        "licenses": [{"expression": spdx} if spdx else {"license": {"name": text}}],
    }


def table() -> str:
    """Licences of torch and of all that the lock file pins, and which part of halfsilver they are for."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    users = {group: closure(lines) for group, lines in groups().items()}
    rows = ["| package | version | licence | for |", "|---|---|---|---|"]
    for name in sorted([*re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE), "torch"]):
        parts = [group for group, found in users.items() if name in found]
        version, _, text = _about(name)
        version = version.split("+")[0]  # torch names its build there
        rows.append(f"| {name} | {version} | {text} | {'core' if 'core' in parts else ', '.join(parts)} |")
    return "\n".join(rows) + "\n"


def page(old: str) -> str:
    """The page with the table of this environment at its end."""
    return f"{old.partition(_BEGIN)[0]}{_BEGIN}\n\n{table()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of licences into docs/licences.md")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(json.dumps(sbom(), indent=1))


if __name__ == "__main__":
    main()
