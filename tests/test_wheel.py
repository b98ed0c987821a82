"""What is installed: five packages, two console scripts, and nothing else at top level."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.helpers import ROOT

PACKAGES = {"convert", "models", "calibrate", "export", "validate"}


def test_the_wheel_holds_the_five_packages_and_both_scripts(tmp_path: Path) -> None:
    # From a copy: building in place would leave folders in the checkout.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "*.egg-info", "work", "output", "golden"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*build, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("edge_convert-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.partition("/")[0] for name in names} == PACKAGES | {info}
    assert "convert = convert.cli:main" in scripts and "edge-convert = convert.cli:main" in scripts
    assert any(name.startswith("models/families/") for name in names)
    assert "validate/templates/report.html.j2" in names
