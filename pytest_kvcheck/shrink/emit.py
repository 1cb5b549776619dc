"""Placeholder."""
from pathlib import Path
from pytest_kvcheck.shrink.minimise import Minimised
def emit(folder: Path, made: Minimised) -> None: ...
